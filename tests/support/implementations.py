"""All that computes an operator, behind one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from cuda_kernels import ALL_BLOCKS, assert_guard_is_intact, guarded
from emulated_plugins import NUMBERS, EmulatedOp, array_of
from kernel_sessions import run_poisoned, session
from one_node import one_node_model
from torch import Tensor

from effexport.plugins.contract import ROUNDING, Case, Contract, Output, load_contract
from effexport.plugins.ops import OPS, Op

Inputs = Mapping[str, Tensor]


class Implementation:
    """answers(case, inputs) returns the outputs, into which NaN was written before if the caller allocates them, and
    run(case, inputs) the only one.

    ways: arguments of both that must not show in a result.
    """

    ways: tuple[dict[str, int], ...] = ()

    def __init__(self, op: Op) -> None:
        self.op = op
        self.contract = load_contract(op)

    def answers(self, case: Case, inputs: Inputs, **how: int) -> list[np.ndarray]:
        raise NotImplementedError

    def run(self, case: Case, inputs: Inputs, **how: int) -> np.ndarray:
        (output,) = self.answers(case, inputs, **how)
        return output


class Torch(Implementation):
    def call(self, *tensors: Tensor, **attributes: Any) -> Tensor | tuple[Tensor, ...]:
        operator: Callable[..., Tensor | tuple[Tensor, ...]] = getattr(self.op.load(), self.op.torch_name)
        return operator(*tensors, *attributes.values())

    def answers(self, case: Case, inputs: Inputs, **how: int) -> list[np.ndarray]:
        outputs = self.call(*inputs.values(), **self.contract.attributes(case), **how)
        return [array_of(x) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]


class Ort(Implementation):
    ways: tuple[dict[str, int], ...] = ({"threads": 1}, {"threads": 5})
    body = False

    def answers(self, case: Case, inputs: Inputs, *, threads: int = 2, opset: int = 20, **how: int) -> list[np.ndarray]:
        feeds = {name: array_of(tensor) for name, tensor in inputs.items()}
        types = tuple((name, x.dtype, x.ndim) for name, x in feeds.items())
        attributes = self.contract.attributes(case) | how
        opened = one_node_session(self.op.onnx_name, self.body, types, (*attributes.items(),), threads, opset)
        made = [(output.shape, dtype_of(output)) for output in self.contract.outputs(case).values()]
        return run_poisoned(opened, feeds, made)


@functools.lru_cache(maxsize=16)
def one_node_session(
    op: str,
    body: bool,
    types: tuple[tuple[str, np.dtype, int], ...],
    attributes: tuple[tuple[str, Any], ...],
    threads: int,
    opset: int,
) -> Any:
    """A session for all calls of an operator that differ in nothing but sizes. Making one takes a hundred times as long
    as a call of it: ONNX Runtime inlines the body.

    types: names, element types and ranks of the inputs.
    """
    feeds = {name: np.empty((0,) * rank, dtype) for name, dtype, rank in types}
    model = one_node_model(op, feeds, body=body, opset=opset, **dict(attributes))
    return session(model, library=not body, threads=threads)


class Body(Ort):
    ways = ()
    body = True


class Cuda(Implementation):
    """launch_cuda in the emulation, called as scripts/gpu does."""

    ways = ({"seed": 1, "max_blocks": 1}, {"seed": 2, "max_blocks": 3}, {"seed": 1000}, {"multiprocessors": 1000})

    def __init__(self, op: Op, *options: str) -> None:
        super().__init__(op)
        self.emulated = EmulatedOp(op, *options)
        self.library = self.emulated.library
        pointer = ctypes.c_void_p
        self._launch = getattr(self.library, f"effexport_check_{op.torch_name}")
        self._launch.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, pointer]
        self._scratch = getattr(self.library, f"effexport_check_{op.torch_name}_scratch")
        self._scratch.argtypes, self._scratch.restype = [ctypes.c_int, pointer], ctypes.c_size_t

    def answers(
        self,
        case: Case,
        inputs: Inputs,
        *,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
        multiprocessors: int = 1,
        **how: int,
    ) -> list[np.ndarray]:
        assert not how
        self.library.set_multiprocessors(multiprocessors)
        given = [np.ascontiguousarray(array_of(x)) for x in inputs.values()]
        outputs = [guarded(output.shape, dtype_of(output)) for output in self.contract.outputs(case).values()]
        scratch, whole_scratch = guarded((self.scratch_bytes(case),), np.dtype(np.uint8))
        self.library.set_schedule(seed, max_blocks)
        arrays = [*given, *(out for out, _ in outputs)]
        assert self.launch(case, [x.ctypes.data for x in arrays], scratch.ctypes.data) == 0
        for whole in (whole_scratch, *(whole for _, whole in outputs)):
            assert_guard_is_intact(whole)
        return [out for out, _ in outputs]

    def scratch_bytes(self, case: Case) -> int:
        return int(self._scratch(NUMBERS.get(case.dtype, 0), (ctypes.c_int64 * len(case.sizes))(*case.sizes)))

    def launch(self, case: Case, addresses: list[int], scratch: int = 0) -> int:
        """The CUDA error of a launch."""
        sizes, numbers = (ctypes.c_int64 * len(case.sizes))(*case.sizes), (ctypes.c_double * 4)(*case.numbers)
        arrays = (ctypes.c_void_p * len(addresses))(*addresses)
        error: int = self._launch(NUMBERS.get(case.dtype, 0), arrays, sizes, numbers, scratch, None)
        return error


MAKERS: dict[str, Callable[[Op], Any]] = {
    "torch": Torch,
    "body": Body,
    "kernel": Ort,
    "cuda": Cuda,
    "cuda sm_75": lambda op: Cuda(op, "-DEFFEXPORT_EMULATED=750"),
}


@functools.cache
def implementation(op: str, how: str) -> Any:
    return MAKERS[how](OPS[op])


def within_limit(contract: Contract, case: Case, actual: np.ndarray, expected: Tensor, how: str = "kernel") -> bool:
    """True if an output of an implementation, by its key in MAKERS, is as exact as the contract says."""
    limit, wanted = contract.limit(case).value, array_of(expected).astype(np.float64)
    if case.dtype in ("float16", "bfloat16"):
        limit += contract.body_limit * (how == "body")
        limit -= contract.cuda_roundings * ROUNDING[case.dtype] * ("cuda" not in how)
    found = actual.astype(np.float64)
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return False
    return bool(np.abs(found - wanted).max(initial=0) <= limit * np.abs(wanted).max(initial=0))


def exact(contract: Contract, case: Case, inputs: dict[str, Tensor]) -> np.ndarray:
    """The right value of the only output, in float64."""
    (expected,) = contract.exact(case, inputs).values()
    return array_of(expected)


def dtype_of(output: Output) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if output.dtype == torch.bfloat16 else str(output.dtype).removeprefix("torch."))
