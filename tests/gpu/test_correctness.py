"""gpu.correctness finds every kind of fault that a kernel can have, and passes a right one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from gpu.correctness import check_case, result_of
from gpu.device import ALL_BLOCKS, FEW_BLOCKS, Device, KernelError
from gpu.samples import relative_error
from gpu.stages import FAILED, NOT_RUN, PASSED
from torch import Tensor

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import OPS

CHECK = load_contract(OPS["MaskedAttention"])
CASE = Case((2, 1, 3, 5, 4, 4), (0.5,))
SCRATCH_BYTES = 16


class FakeKernels:
    """Right results, computed on the CPU. `spoil` may change arrays or scratch memory after each call."""

    def __init__(self, spoil: Callable[[Sequence[Tensor], Tensor], object] = lambda arrays, scratch: None) -> None:
        self.device = Device(emulated=True)
        self.spoil = spoil
        self.calls = 0
        self.most_blocks: list[int] = []

    def set_schedule(self, seed: int, most_blocks: int) -> None:
        self.most_blocks.append(most_blocks)

    def scratch_bytes(self, op: str, case: Case) -> int:
        return SCRATCH_BYTES

    def launch(self, op: str, case: Case, arrays: Sequence[Tensor], scratch: Tensor) -> None:
        self.calls += 1
        assert bool((scratch == 0xFF).all())
        assert bool(arrays[-1].isnan().all())
        inputs = dict(zip(("q", "k", "v", "keep"), arrays, strict=False))
        arrays[-1].copy_(CHECK.exact(case, inputs)["out"])
        self.spoil(arrays, scratch)


def beyond(tensor: Tensor, at: int) -> Tensor:
    """One element outside of a tensor, in the memory around it."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + at)


def problem_of(kernels: FakeKernels) -> str:
    return check_case(kernels, "masked_attention", CHECK, CASE)["problem"]


def test_a_right_kernel_passes() -> None:
    found = check_case(FakeKernels(), "masked_attention", CHECK, CASE)
    assert found["problem"] == ""
    assert 0 <= found["error"] <= found["limit"]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda arrays, scratch: arrays[-1].view(-1)[-1:].fill_(float("nan")), "error nan"),
        (lambda arrays, scratch: arrays[-1].mul_(1.001), "error 0.001"),
        (lambda arrays, scratch: beyond(arrays[-1], arrays[-1].numel()).fill_(0), "wrote beyond out"),
        (lambda arrays, scratch: beyond(arrays[-1], -1).fill_(0), "wrote beyond out"),
        (lambda arrays, scratch: beyond(scratch, SCRATCH_BYTES).fill_(0), "wrote beyond scratch"),
        (lambda arrays, scratch: arrays[0].add_(1), "changed its inputs"),
    ],
    ids=["unwritten", "inaccurate", "after the output", "before the output", "after the scratch", "inputs"],
)
def test_a_fault_is_found(spoil: Callable[[Sequence[Tensor], Tensor], object], problem: str) -> None:
    assert problem in problem_of(FakeKernels(spoil))


def test_different_bits_in_the_second_call_are_found() -> None:
    kernels = FakeKernels()
    kernels.spoil = lambda arrays, scratch: arrays[-1].view(-1)[0].mul_(1 + 1e-7 * kernels.calls)
    assert problem_of(kernels) == "two calls gave different bits"


def test_a_failed_launch_is_the_problem_of_its_case_alone() -> None:
    def fail(arrays: Sequence[Tensor], scratch: Tensor) -> None:
        raise KernelError("cudaErrorInvalidValue")

    assert problem_of(FakeKernels(fail)) == "cudaErrorInvalidValue"


def test_blocks_take_several_items_in_the_second_call_of_a_small_case() -> None:
    kernels = FakeKernels()
    for case in (CHECK.small[0], CHECK.checked[0]):
        check_case(kernels, "masked_attention", CHECK, case)
    assert kernels.most_blocks == [ALL_BLOCKS, FEW_BLOCKS, ALL_BLOCKS, ALL_BLOCKS]


def error_of(outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    check = replace(CHECK, exact=lambda case, inputs: expected, intermediate=lambda case: 0)
    return float(relative_error(check, Case((1,)), {}, outputs))


def test_integers_are_compared_exactly() -> None:
    right = torch.arange(4)
    assert error_of({"x": right}, {"x": right}) == 0
    assert error_of({"x": right}, {"x": torch.tensor([0, 1, 2, 4])}) == 0.25


def test_a_nan_in_any_output_is_the_error() -> None:
    right, wrong = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    for outputs in ({"x": wrong, "y": right}, {"x": right, "y": wrong}):
        assert math.isnan(error_of(outputs, {"x": right, "y": right}))


def test_a_reference_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"an output has shape \(3,\), its reference \(1, 3\)"):
        error_of({"x": torch.ones(3)}, {"x": torch.ones(1, 3)})


def test_a_result_is_failed_only_if_something_is_wrong() -> None:
    good = {"case": "a", "problem": ""}
    late = {"case": "b", "problem": "no time was left"}
    bad = {"case": "c", "problem": "error nan"}
    assert result_of([good]).status == PASSED
    assert result_of([good, late]).status == NOT_RUN
    assert result_of([good, late, bad]).status == FAILED
