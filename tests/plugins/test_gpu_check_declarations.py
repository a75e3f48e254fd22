"""The declarations of gpu_check.py: their references and baselines against the operators' own references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from effexport.plugins.gpu_check import Case, FasterThan, GpuCheck, load_gpu_check
from effexport.plugins.ops import OPS, Op

# op.py's reference, called with the inputs and what a case says
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "iterative_pinv": lambda reference, case, inputs: reference(*inputs, case.sizes[2]),
    "linear_attention": lambda reference, case, inputs: reference(*inputs, case.numbers[0], bool(case.sizes[5])),
    "lsh_attention": lambda reference, case, inputs: reference(*inputs, *case.sizes[6:]),
    "aft_simple_attention": lambda reference, case, inputs: reference(*inputs),
    "segment_means": lambda reference, case, inputs: reference(*inputs, case.sizes[4]),
    "sequence_conv": lambda reference, case, inputs: reference(*inputs),
}
# baselines that compute something else, nearly the same work
OTHER_RESULTS = {"mean", "SDPA flash", "SDPA cuDNN", "SDPA memory-efficient", "torch.sort"}

every_operator = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.torch_name)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-300))


def is_rounded(op: Op, case: Case) -> bool:
    """Whether the case is one whose logarithms are float32 by definition."""
    return op.torch_name == "lsh_attention" and bool(case.sizes[-1])


@pytest.mark.parametrize("name", REFERENCES)
def test_references_agree_with_those_of_the_operators(name: str) -> None:
    op = next(op for op in OPS.values() if op.torch_name == name)
    check, reference = load_gpu_check(op), op.load().reference
    for case in check.small:
        inputs = check.inputs(case, "cpu")
        ((output, expected),) = check.reference(case, inputs).items()
        # op.py's reference makes float32 of half precision, and then float32 decides how it rounds
        wide = torch.float32 if is_rounded(op, case) else torch.float64
        exact = [x.to(wide) if x.is_floating_point() else x for x in inputs.values()]
        own = REFERENCES[name](reference, case, exact)
        # logits of −1e5 have a spacing of 1.5e-11 in float64
        limit = check.limit(replace(case, dtype="float32")).value if is_rounded(op, case) else 1e-10
        assert expected.dtype == torch.float64
        assert expected.shape == check.outputs(case)[output].shape
        assert relative_error(own, expected) <= limit, case.name


@every_operator
def test_inputs_are_the_same_on_every_call_and_contiguous(op: Op) -> None:
    check = load_gpu_check(op)
    for case in check.small:
        first, again = (check.inputs(case, "cpu") for _ in range(2))
        for name, value in first.items():
            assert value.is_contiguous()
            torch.testing.assert_close(value, again[name], rtol=0, atol=0, equal_nan=True)


def baselines_of(check: GpuCheck) -> list[tuple[Case, dict[str, Tensor], dict[str, Any]]]:
    inputs = [(timed.small, check.inputs(timed.small, "cpu")) for timed in check.timed]
    return [(case, values, check.baselines(case, values)) for case, values in inputs]


@every_operator
def test_baselines_compute_what_the_operator_does(op: Op) -> None:
    check = load_gpu_check(op)
    for case, inputs, baselines in baselines_of(check):
        expected = next(iter(check.reference(case, inputs).values()))
        for name in baselines.keys() - OTHER_RESULTS:
            result = baselines[name]()
            result = result if isinstance(result, Tensor) else result[0]
            # standard operators round several times to the inputs' type, and to float32
            limit = 0 if case.dtype == "int32" else 2e-5 if case.dtype == "float32" else 2e-2
            assert relative_error(result, expected) <= limit, f"{case.name}, {name}"


@every_operator
def test_goals_name_baselines_that_exist(op: Op) -> None:
    check = load_gpu_check(op)
    for timed, (case, _, baselines) in zip(check.timed, baselines_of(check), strict=True):
        assert timed.case.dtype == case.dtype
        wanted = {goal.baseline for goal in timed.goals if isinstance(goal, FasterThan)}
        assert wanted <= baselines.keys()
