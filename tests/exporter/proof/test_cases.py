"""Stored cases: every form in which they say which of their tokens count, and forms that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from effexport.base.errors import StageError, UserError
from effexport.base.spec import BuildSpec
from effexport.models.user.spec import ModuleSpec
from effexport.models.validation import SpecError
from effexport.models.variants.pytorch import PyTorchSpec
from effexport.pipeline.build import check_axes
from effexport.proof.cases import Case, kept_tokens, load_reference, save_reference, stored_cases
from effexport.proof.check import Limit
from effexport.proof.checks.arithmetic import check_arithmetic
from effexport.proof.inputs import random_inputs

pytestmark = pytest.mark.requires("torch", "onnx")
# Axes of an input and an output, and the shape in which db4d7bd has stored which tokens count: an input without an
# axis of tokens, or without one of the batch, has none.
FORMS: list[tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]] = [
    (("batch", 3, 8), ("batch", 5), (2,)),
    (("batch", "seq", 8), ("batch", "seq"), (2, 6)),
    (("seq", "batch", 8), ("seq", "batch"), (2, 6)),
    (("seq", 8), ("seq", 5), (6,)),
    ((4, 8), (4,), (1,)),
    (("batch", "height", 8), ("batch", "height"), (2,)),
    (("batch",), ("batch", 3), (2,)),
    ((), (), (1,)),
]


def spec_of_module(inputs: dict[str, Any], output: tuple[Any, ...], **fields: Any) -> BuildSpec:
    model = ModuleSpec(
        vocab_size=2,
        seq_len=6,
        module="theirs",
        attention_fields=PyTorchSpec(seq_len=6).to_dict(),
        attention_layers=1,
        fused_op_counts={},
        unfused_op_counts={},
        input_dims=inputs,
        output_dims={"y": output},
        longest=None,
        tensor_types={"x": "float", "y": "float", "attention_mask": "int64", "hidden": "bool"},
        axis_sizes={"height": 7},
        **{"mask": "", **fields},
    )
    return BuildSpec(model=model, batch=2)


def case_of(spec: BuildSpec, batch: int = 2) -> Case:
    inputs = random_inputs(spec, np.random.default_rng(0), batch, 6, [6] + [4] * (batch - 1))
    sizes = {"batch": batch, "seq": 6, "height": 7}
    shape = [sizes.get(dim, dim) for dim in spec.outputs[0].dims]
    tokens = kept_tokens(inputs, spec)
    return Case("export", inputs, {"y": np.ones(shape, np.float32)}, tokens=tokens, pooled=spec.pooled_outputs)


def stored(case: Case, spec: BuildSpec, folder: Path) -> Case:
    save_reference([case], folder / "reference.safetensors")
    (found,) = stored_cases(folder / "reference.safetensors", spec)
    return found


@pytest.mark.parametrize(("axes", "output", "shape"), FORMS)
def test_a_model_of_any_axes_says_which_tokens_count(
    axes: tuple[Any, ...], output: tuple[Any, ...], shape: tuple[int, ...], tmp_path: Path
) -> None:
    spec = spec_of_module({"x": axes}, output)
    case = stored(case_of(spec), spec, tmp_path)
    assert case.keep.shape == shape == case.label.shape
    assert case.keep.all()
    assert case.inputs["x"].ndim == len(axes)  # a number stays without axes
    right = check_arithmetic(case, {"y": case.outputs["y"]}, Limit(1e-6, ""))
    assert right.status == "passed"
    wrong = case.outputs["y"].copy()
    wrong[(-1,) * wrong.ndim] += 1
    found = check_arithmetic(case, {"y": wrong}, Limit(1e-6, ""))
    assert found.status == "failed"
    assert found.worst is not None
    assert found.worst.index == tuple(size - 1 for size in wrong.shape or (1,))


@pytest.mark.parametrize(("axes", "output", "shape"), FORMS)
@pytest.mark.parametrize(
    "change",
    [
        lambda kept: np.zeros_like(kept),
        lambda kept: kept[None],
        lambda kept: np.ones((*kept.shape[:-1], kept.shape[-1] + 1), bool),
        lambda kept: kept.astype(np.int64),
        lambda kept: np.array(True),
    ],
    ids=["nothing", "an axis more", "a place more", "numbers", "no axis"],
)
def test_what_hides_a_sequence_or_has_another_shape_is_refused(
    axes: tuple[Any, ...],
    output: tuple[Any, ...],
    shape: tuple[int, ...],
    change: Callable[[Any], Any],
    tmp_path: Path,
) -> None:
    spec = spec_of_module({"x": axes}, output)
    case = replace(case_of(spec), tokens={"kept": change(np.ones(shape, bool))})
    with pytest.raises(UserError, match=r"is damaged: in the case 'export', (nothing says|a mask keeps no token)"):
        stored(case, spec, tmp_path)


def test_one_of_several_samples_without_tokens_cannot_be_hidden(tmp_path: Path) -> None:
    spec = spec_of_module({"x": ("batch", 3, 8)}, ("batch", 5))
    case = replace(case_of(spec), tokens={"kept": np.array([True, False])})
    with pytest.raises(UserError, match="a mask keeps no token of a sequence"):
        stored(case, spec, tmp_path)


@pytest.mark.parametrize(
    ("name", "dims", "ignores"),
    [
        ("attention_mask", ("batch", "seq"), False),
        ("attention_mask", ("batch", "seq"), True),
        ("attention_mask", ("batch", 1, "seq"), False),
        ("attention_mask", ("batch", 1, "seq", "seq"), True),
        ("attention_mask", ("seq", "batch"), False),
        ("hidden", ("batch", "seq"), True),
    ],
)
def test_a_mask_of_any_form_says_which_tokens_count(
    name: str, dims: tuple[Any, ...], ignores: bool, tmp_path: Path
) -> None:
    spec = spec_of_module({"x": ("batch", "seq", 8), name: dims}, ("batch", "seq"), mask=name, mask_ignores=ignores)
    case = case_of(spec)
    expected = np.array([[True] * 6, [True] * 4 + [False] * 2])
    np.testing.assert_array_equal(stored(case, spec, tmp_path).keep, expected)
    # as db4d7bd has stored every mask of this name
    if name == "attention_mask":
        np.testing.assert_array_equal(stored(replace(case, tokens={}), spec, tmp_path).keep, expected)


def test_a_mask_without_the_axes_of_tokens_is_refused() -> None:
    with pytest.raises(SpecError, match="the mask 'hidden' has the axes \\[7\\]; expected batch and seq among them"):
        spec_of_module({"x": ("batch", "seq", 8), "hidden": [7]}, ("batch", "seq"), mask="hidden")


def test_a_place_among_kept_tokens_is_that_in_the_whole_output() -> None:
    keep = np.array([[True, False, True, True]])
    case = Case("c", {"attention_mask": keep.astype(np.int64)}, {"y": np.ones((1, 4, 2, 3), np.float32)})
    wrong = case.outputs["y"].copy()
    wrong[0, 2, 1, 0] += 1
    worst = check_arithmetic(case, {"y": wrong}, Limit(1e-6, "")).worst
    assert worst is not None
    assert worst.index == (0, 2, 1, 0)


def test_a_build_whose_answers_have_other_axes_says_so_before_it_writes_any() -> None:
    spec = spec_of_module({"x": ("batch", 8)}, ("batch", 5))
    case = case_of(spec)
    check_axes([case], spec)
    with pytest.raises(StageError, match="the axes that were found for theirs do not hold in the case 'export': y has"):
        check_axes([replace(case, outputs={"y": np.ones((3, 5), np.float32)})], spec)


def test_numbers_without_axes_are_stored_as_such(tmp_path: Path) -> None:
    case = Case("c", {"x": np.array(2.0, np.float32)}, {"y": np.ones((3, 2), np.float32).T})
    save_reference([case], tmp_path / "x.safetensors")
    (read,) = load_reference(tmp_path / "x.safetensors")
    assert read.inputs["x"].shape == ()
    np.testing.assert_array_equal(read.outputs["y"], case.outputs["y"])
