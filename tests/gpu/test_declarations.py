"""Every operator declares its checks on a GPU, and the declarations agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from effexport.plugins.contract import ROUNDING, FasterThan, load_contract
from effexport.plugins.ops import CUDA_OPS, Op

PLUGINS = Path(__file__).parents[2] / "plugins"
HUGE = 2**31

every_operator = pytest.mark.parametrize("op", CUDA_OPS.values(), ids=lambda op: op.torch_name)


@every_operator
def test_the_cases_have_all_types_and_no_name_twice(op: Op) -> None:
    check = load_contract(op)
    for cases in (check.small, check.checked):
        assert {case.dtype for case in cases} == set(op.element_types)
    names = [case.name for case in (*check.small, *check.checked, *check.huge)]
    assert len(names) == len(set(names))
    assert check.timed


@every_operator
def test_references_have_the_declared_shapes_and_no_nan(op: Op) -> None:
    check = load_contract(op)
    for case in check.small:
        inputs = check.inputs(case, "cpu")
        again = check.inputs(case, "cpu")
        torch.testing.assert_close(again, inputs, rtol=0, atol=0, equal_nan=True)
        assert all(value.is_contiguous() for value in inputs.values())
        references, outputs = check.exact(case, inputs), check.outputs(case)
        assert {name: tuple(value.shape) for name, value in references.items()} == {
            name: tuple(output.shape) for name, output in outputs.items()
        }
        assert all(value.isfinite().all() for value in references.values())
        exact = not any(output.dtype.is_floating_point for output in outputs.values())
        assert all(value.dtype == torch.float64 or exact for value in references.values())
        assert check.limit(case).reason


@every_operator
def test_goals_name_baselines_that_exist_and_run(op: Op) -> None:
    check = load_contract(op)
    for timed in check.timed:
        assert (timed.small.dtype, timed.small.kind) == (timed.case.dtype, timed.case.kind)
        baselines = check.baselines(timed.small, check.inputs(timed.small, "cpu"))
        assert baselines
        for call in baselines.values():
            call()
        assert {goal.baseline for goal in timed.goals if isinstance(goal, FasterThan)} <= baselines.keys()
        assert timed.goals


@every_operator
def test_the_shim_stands_beside_the_kernel(op: Op) -> None:
    text = (PLUGINS / op.torch_name / "gpu_check.cc").read_text(encoding="utf-8")
    assert f"EFFEXPORT_GPU_CHECK({op.torch_name})" in text
    assert f"EFFEXPORT_GPU_CHECK_SCRATCH({op.torch_name})" in text


def test_some_operator_is_checked_with_more_elements_than_int32_counts() -> None:
    for op in CUDA_OPS.values():
        check = load_contract(op)
        for case in check.huge:
            assert max(torch.Size(output.shape).numel() for output in check.outputs(case).values()) > HUGE
    assert any(load_contract(op).huge for op in CUDA_OPS.values())


def test_pseudo_inverses_are_held_to_what_their_contract_says() -> None:
    contract = (PLUGINS / "iterative_pinv" / "README.md").read_text(encoding="utf-8")
    stated = {
        bool(above): float(value)
        for above, value in re.findall(
            r"^\| CUDA kernel (?:up to|(above)) m = 128.*\| (\de-\d) [^|]*\|$", contract, re.M
        )
    }
    check = load_contract(CUDA_OPS["IterativePinv"])
    cases = [case for case in (*check.small, *check.checked) if case.kind != "softmax" and case.dtype == "float32"]
    assert {case.sizes[1] > 64 for case in cases} == {False, True}
    for case in cases:
        assert check.limit(case).value <= stated[case.sizes[1] > 64] + ROUNDING["float32"], case.name


@every_operator
def test_every_contract_says_what_the_namespace_of_its_nodes_is_for(op: Op) -> None:
    contract = (PLUGINS / op.torch_name / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| attribute \| `plugin_namespace` \|.*$", contract, re.MULTILINE)
    assert op.load_trt().PLUGINS
    assert row.endswith("tells TensorRT to prefer a plugin |")
