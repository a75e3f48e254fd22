"""The distance of PyTorch in float32 from the same module in float64: the reference's own error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from effexport.base.dtypes import Array
from effexport.base.environment import free_memory_bytes
from effexport.base.formatting import memory
from effexport.base.spec import BuildSpec
from effexport.models.user.modes import Observer
from effexport.proof.cases import Case
from effexport.proof.check import Check, Kind, judged, not_run
from effexport.proof.module_runs import RepeatedRuns, run_module
from effexport.proof.tolerances import largest_change, reference_limit

METRIC = "max |float32 − float64| / RMS"
# The peak is that of PyTorch's tensors: the workspaces of its kernels, and other processes, need room too.
SHARE_OF_FREE_MEMORY = 0.5
# Where the system does not say how much memory is free, as on macOS.
ASSUMED_FREE_BYTES = 2 * 10**9
# How many operators a sentence lists.
LISTED = 3
AsIn = Callable[[nn.Module, Case], AbstractContextManager[Any]]


class Float64Module:
    """A copy of a float32 module in float64, made when it is first needed.

    as_in: given the copy and a case, makes what was random or ambiguous in float32 the same in the copy.
    """

    def __init__(self, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns, as_in: AsIn) -> None:
        self._module, self._spec, self._runs = module, spec, runs
        self._as_in = as_in
        self._exact: nn.Module | None = None

    def check(self, case: Case, peak_bytes: int) -> Check:
        """A check that PyTorch's answer to a case is as close to float64 as float32 can be.

        peak_bytes: of the tensors of a float32 run on this case.
        """
        reason = self._why_left_out(peak_bytes)
        if reason:
            return not_run(Kind.REFERENCE, reason, case.label, METRIC)
        if self._exact is None:
            self._exact = copy.deepcopy(self._module).double()
        try:
            with RoundingOperators() as rounding:
                outputs = self._outputs(case)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"the module does not run in float64: {str(error).strip().splitlines()[0]}"
            return not_run(Kind.REFERENCE, reason, case.label, METRIC)
        limit = reference_limit(self._spec)
        if not largest_change(case, outputs) <= limit.value:
            # the float64 run can be the wrong one, too
            outputs = self._runs.answer(case.label, lambda: {"outputs": self._outputs(case)})["outputs"]
        value = largest_change(case, outputs)
        # a case that PyTorch itself disputed is not excused
        may_differ = self._spec.model.why_float64_differs and case.label not in self._runs.disputed
        if not value <= limit.value and may_differ:
            reason = (
                f"PyTorch in float32 is {value:.2g} from float64, and the limit is {limit.value:.2g}, but this need "
                f"not be an error: {self._spec.model.why_float64_differs}"
            )
            return not_run(Kind.REFERENCE, reason, case.label, METRIC)
        detail = f"PyTorch in float32 is itself {value:.1g} from float64{rounding.remark}"
        return judged(Kind.REFERENCE, case.label, METRIC, value, limit, detail)

    def _outputs(self, case: Case) -> Mapping[str, Array]:
        assert self._exact is not None
        with self._as_in(self._exact, case):
            return run_module(self._exact, self._spec, case.inputs)

    def _why_left_out(self, peak_bytes: int) -> str:
        """The reason if a run in float64 might not fit into memory, otherwise ""."""
        weights_bytes = sum(weight.nbytes for weight in self._module.state_dict().values())
        # every tensor at twice its size; and the weights once more, while they are copied
        needed = 2 * peak_bytes + (3 * weights_bytes if self._exact is None else 0)
        free = free_memory_bytes()
        usable = SHARE_OF_FREE_MEMORY * (ASSUMED_FREE_BYTES if free is None else free)
        if needed <= usable:
            return ""
        return (
            f"a run in float64 needs about {memory(needed)}, and half of the memory that is free here is "
            f"{memory(usable)}; build or verify on a machine with more"
        )


class PeakMemory(Observer):
    """Measures the largest total size of the tensors that live at the same time, of those made in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def seen(self, func: Any, arguments: Any, result: Any) -> None:
        for tensor in strided_tensors(result):
            storage = tensor.untyped_storage()
            self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.size_bytes = max(self.size_bytes, sum(self._alive.values()))


class RoundingOperators(Observer):
    """Collects the operators that compute floating-point numbers in less than float64 in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def seen(self, func: Any, arguments: Any, result: Any) -> None:
        # lift_fresh takes in an input, before it is widened; what is made of integers and booleans is exact
        computes = func is not torch.ops.aten.lift_fresh.default and float_types(arguments)
        if computes and float_types(result) - {torch.float64}:
            self.names.add(str(func))

    @property
    def remark(self) -> str:
        """The operators, for the end of a sentence; "" if all ran in float64."""
        if not self.names:
            return ""
        listed = ", ".join(sorted(self.names)[:LISTED])
        more = ", …" if len(self.names) > LISTED else ""
        return f", not counting the rounding of {listed}{more}, which the module runs in lower precision"


def strided_tensors(values: Any) -> list[torch.Tensor]:
    """The ordinary tensors in arguments or results: not sparse, not MKL-DNN's own layout."""
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.layout == torch.strided]


def float_types(values: Any) -> set[torch.dtype]:
    """The floating-point types of the tensors in arguments or results."""
    return {tensor.dtype for tensor in strided_tensors(values) if tensor.is_floating_point()}


# Large enough that PyTorch, and MKL below it, give every thread a part of the work; a few milliseconds each.
BATCH, ROWS, COLUMNS = 256, 64, 128


def warm_up() -> None:
    """Have every thread make its first exponential, logarithm, softmax and matrix products.

    On a Xeon with AVX-512 and AMX, the first forward pass of an LSH layer (seq 8192) was wrong in 13 of 110 fresh
    processes, by 2.3e-5 RMS, in exactly the heads that one of two threads had computed; every later pass was right. The
    projections and the hash before it were right. It did not happen with MKL limited to AVX2, and still did with
    PyTorch's own kernels limited to AVX2, so it is in what MKL computes in the attention itself: the batched products
    (sgemm_batch), the exponential and the logarithm (VML). Which of these it is remains unknown: on a Xeon with AVX-512
    but without AMX it could not be reproduced, in 80 fresh processes nor in 60 first calls each of the exponential, of
    the product and of the whole attention. So all of them are made here, and the softmax. What slips through is caught
    by RepeatedRuns.
    """
    with torch.inference_mode():
        left = torch.linspace(-1, 1, BATCH * ROWS * ROWS).reshape(BATCH, ROWS, ROWS)
        right = torch.linspace(-1, 1, BATCH * ROWS * COLUMNS).reshape(BATCH, COLUMNS, ROWS)
        logits = torch.bmm(left, right.transpose(1, 2))
        torch.bmm(torch.exp(logits - logits.amax(dim=-1, keepdim=True)), right)
        torch.log(logits.abs() + 1)
        torch.softmax(logits, dim=-1)
        rows = left.flatten(0, 1)
        torch.mm(rows, rows[:COLUMNS].T)
