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
from one_node import run_body, run_kernel
from torch import Tensor

from effexport.plugins.contract import Case, Contract, load_contract
from effexport.plugins.ops import OPS, Op

Inputs = Mapping[str, Tensor]
BF16 = np.dtype(ml_dtypes.bfloat16)


class Implementation:
    """run(case, inputs) returns the output, into which NaN was written before if the caller allocates it.

    ways: arguments of `run` that must not show in a result.
    """

    ways: tuple[dict[str, int], ...] = ()

    def __init__(self, op: Op) -> None:
        self.op = op
        self.contract = load_contract(op)

    def shape(self, case: Case) -> tuple[int, ...]:
        (output,) = self.contract.outputs(case).values()
        return output.shape


class Torch(Implementation):
    def call(self, *tensors: Tensor, **attributes: Any) -> Tensor:
        operator: Callable[..., Tensor] = getattr(self.op.load(), self.op.torch_name)
        return operator(*tensors, *attributes.values())

    def run(self, case: Case, inputs: Inputs) -> np.ndarray:
        return array_of(self.call(*inputs.values(), **self.contract.attributes(case)))


class Ort(Implementation):
    ways: tuple[dict[str, int], ...] = ({"threads": 1}, {"threads": 5})
    run_node = staticmethod(run_kernel)

    def run(self, case: Case, inputs: Inputs, **how: int) -> np.ndarray:
        feeds = {name: array_of(tensor) for name, tensor in inputs.items()}
        return self.run_node(self.op.onnx_name, feeds, self.shape(case), **self.contract.attributes(case), **how)


class Body(Ort):
    ways = ()
    run_node = staticmethod(run_body)


class Cuda(Implementation):
    """launch_cuda in the emulation, called as scripts/gpu does."""

    ways = ({"seed": 1, "max_blocks": 1}, {"seed": 2, "max_blocks": 3}, {"seed": 1000})

    def __init__(self, op: Op, *options: str) -> None:
        super().__init__(op)
        self.emulated = EmulatedOp(op.torch_name, *options)
        self.library = self.emulated.library
        pointer = ctypes.c_void_p
        self._launch = getattr(self.library, f"effexport_check_{op.torch_name}")
        self._launch.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, pointer]
        self._scratch = getattr(self.library, f"effexport_check_{op.torch_name}_scratch")
        self._scratch.argtypes, self._scratch.restype = [ctypes.c_int, pointer], ctypes.c_size_t

    def run(self, case: Case, inputs: Inputs, *, seed: int = 0, max_blocks: int = ALL_BLOCKS) -> np.ndarray:
        given = [np.ascontiguousarray(array_of(x)) for x in inputs.values()]
        (output,) = self.contract.outputs(case).values()
        out, whole = guarded(output.shape, BF16 if output.dtype == torch.bfloat16 else np.dtype(case.dtype))
        numbers = NUMBERS.get(case.dtype, 0)
        sizes = (ctypes.c_int64 * len(case.sizes))(*case.sizes)
        scratch, whole_scratch = guarded((self._scratch(numbers, sizes),), np.dtype(np.uint8))
        self.library.set_schedule(seed, max_blocks)
        assert self.launch(case, [*(x.ctypes.data for x in given), out.ctypes.data], scratch.ctypes.data) == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return out

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


def exact(contract: Contract, case: Case, inputs: dict[str, Tensor]) -> np.ndarray:
    """What the output should be, in float64."""
    (expected,) = contract.exact(case, inputs).values()
    return array_of(expected)
