"""References of large cases: few PyTorch calls, parts that make up the whole, and no unwritten element unseen."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import samples
from gpu.samples import chosen_samples, parts, relative_error
from slow_cases import slow
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from effexport.plugins.contract import Case, Contract, load_contract
from effexport.plugins.ops import CUDA_OPS, Op

MOST_CALLS = 2000
# Slices of a recurrence need more than 1000 tokens, and its formula makes 20 calls for each: half a second on a GPU.
MOST_CALLS_OF_RECURRENCES = 45_000
# Of 80 GB: a huge case is alone with those of three other processes, which are not huge.
MOST_BYTES, MOST_BYTES_AT_ONCE = 35e9, 8e9
MASKED = load_contract(CUDA_OPS["MaskedAttention"])
CASE = Case((7, 2, 3, 5, 4, 4), (0.5,))

every_operator = pytest.mark.parametrize("op", CUDA_OPS.values(), ids=lambda op: op.torch_name)


class Account(TorchDispatchMode):
    """Counts calls of PyTorch, and the bytes of all tensors at a time, which need no memory for that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = self.most_bytes = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)):
            if storage not in self.known:
                self.known.add(storage)
                self.change(storage.nbytes())
                weakref.finalize(storage, self.change, -storage.nbytes())
        return result

    def change(self, size: int) -> None:
        self.bytes += size
        self.most_bytes = max(self.most_bytes, self.bytes)


def largest(cases: Collection[Case]) -> list[Case]:
    """The cases of which no other has as much of every size."""
    return [
        case
        for case in cases
        if not any(other is not case and all(map(operator.le, case.sizes, other.sizes)) for other in cases)
    ]


@pytest.mark.parametrize(
    "op",
    [slow(op) if op.onnx_name == "LinearRecurrence" else op for op in CUDA_OPS.values()],
    ids=lambda op: op.torch_name,
)
def test_no_case_makes_many_calls_of_pytorch_or_fills_the_memory(op: Op) -> None:
    check = load_contract(op)
    # types and values of inputs make no difference
    cases = {case.sizes: case for case in (*check.small, *check.checked, *check.huge)}.values()
    if op.onnx_name == "LinearRecurrence":  # its formula takes minutes for all, and more of any size is more calls
        cases = largest(cases)
    for case in cases:
        with FakeTensorMode(), Account() as account:
            outputs = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in check.outputs(case).items()}
            relative_error(check, case, check.inputs(case, "cpu"), outputs)
        most = MOST_CALLS_OF_RECURRENCES if op.onnx_name == "LinearRecurrence" else MOST_CALLS
        assert account.calls <= most, case.name
        assert account.most_bytes <= (MOST_BYTES if case in check.huge else MOST_BYTES_AT_ONCE), case.name


@every_operator
def test_parts_are_as_large_as_memory_allows_and_make_up_the_whole(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    check = load_contract(op)
    case = max(check.small, key=lambda case: case.sizes[0])
    inputs = check.inputs(case, "cpu")
    expected = check.exact(case, inputs)
    outputs = {name: expected[name].to(one.dtype) for name, one in check.outputs(case).items()}
    assert parts(check, case, {**inputs, **outputs}) == [range(case.sizes[0])]
    monkeypatch.setattr(samples, "PART_BYTES", 1)
    assert len(parts(check, case, {**inputs, **outputs})) == case.sizes[0] > 1
    assert relative_error(check, case, inputs, outputs) <= check.limit(case).value
    last = next(iter(outputs.values()))
    last[-1] += 1
    assert relative_error(check, case, inputs, outputs) > check.limit(case).value


def in_some_samples(count: int) -> Contract:
    return replace(MASKED, huge=(CASE,), compared=count)


def error_with(change: Callable[[Tensor], object], check: Contract) -> Tensor:
    inputs = check.inputs(CASE, "cpu")
    out = check.exact(CASE, inputs)["out"].float()
    change(out)
    return relative_error(check, CASE, inputs, {"out": out})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_unwritten_element_is_found_in_a_sample_that_is_not_compared(value: float) -> None:
    check = in_some_samples(3)
    assert parts(check, CASE, {}) == [[0, 3, 6]]
    assert error_with(lambda out: None, check) < 1e-6
    assert error_with(lambda out: out[1, 1, 1].fill_(value), check).isnan()
    assert error_with(lambda out: out[3].mul_(1.5), check) > 0.1
    assert error_with(lambda out: out[1].mul_(1.5), MASKED) > 0.1


def test_an_unwritten_integer_is_found_in_a_sample_that_is_not_compared() -> None:
    check = load_contract(CUDA_OPS["LSHSort"])
    case = Case((6, 20, 3), dtype="int32")
    check = replace(check, huge=(case,), compared=2)
    inputs = check.inputs(case, "cpu")
    outputs = check.exact(case, inputs)
    assert relative_error(check, case, inputs, outputs) == 0
    outputs["rank"][2, 5] = -1
    assert relative_error(check, case, inputs, outputs).isnan()


def test_samples_lie_on_both_sides_of_every_overflow_and_at_equal_distances() -> None:
    chosen = chosen_samples(4200, 20, [512_000, 1000])
    assert {0, 2096, 2097, 2098, 4193, 4194, 4195, 4199} <= set(chosen)
    assert 4194 * 512_000 < 2**31 < 4195 * 512_000
    assert len(chosen) == 20
    assert max(after - before for before, after in itertools.pairwise(chosen)) <= 4200 // 12
    assert chosen_samples(3, 20, [10]) == [0, 1, 2]


def test_samples_that_are_compared_lie_beyond_what_32_bits_count() -> None:
    for op in CUDA_OPS.values():
        check = load_contract(op)
        for case in check.huge:
            if check.compared is not None:
                size = torch.Size(next(iter(check.outputs(case).values())).shape).numel() // case.sizes[0]
                chosen = [
                    *itertools.chain(*parts(check, case, {"out": torch.empty(case.sizes[0], size, device="meta")}))
                ]
                assert {0, case.sizes[0] - 1, 2**31 // size} <= {*chosen}
