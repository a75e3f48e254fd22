"""Inputs of a user's own model: example inputs, tables and signatures, and messages about wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effexport.models.user.inputs import (
    ModuleInput,
    ModuleInputs,
    inputs_from_examples,
    inputs_from_signature,
    inputs_from_table,
)
from effexport.models.validation import SpecError

STATES = torch.zeros(2, 9, 32)
TOKENS = torch.zeros(2, 9, dtype=torch.int64)


class Model(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, **others: Any) -> Tensor:
        return x


class TwoInputs(nn.Module):
    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return image


def test_the_first_axis_is_the_batch_and_the_second_of_vectors_indices_and_masks_the_sequence() -> None:
    found = inputs_from_examples(Model(), "mine", {"x": STATES, "mask": TOKENS > 0, "scale": 2.0})
    assert found.inputs == (
        ModuleInput(name="x", dims=("batch", "seq", 32)),
        ModuleInput(name="mask", dims=("batch", "seq"), dtype="bool", mask="keep"),
    )
    assert (found.sizes, found.constants, found.is_guess) == ({"seq": 9}, {"scale": 2.0}, True)


def test_an_image_has_no_sequence_and_a_second_length_is_a_number() -> None:
    found = inputs_from_examples(TwoInputs(), "mine", (torch.zeros(2, 3, 8, 8), TOKENS))
    assert [one.dims for one in found.inputs] == [("batch", 3, 8, 8), ("batch", "seq")]
    found = inputs_from_examples(TwoInputs(), "mine", (STATES, torch.zeros(2, 5, 32)))
    assert [one.dims for one in found.inputs] == [("batch", "seq", 32), ("batch", 5, 32)]


@pytest.mark.parametrize(
    "dynamic",
    [
        {"image": {0: "batch", 1: "seq"}, "text": {0: "batch", 1: "memory"}},
        {"image": ("batch", "seq", None), "text": ["batch", "memory", 32]},
        {"image": {0: "batch", 1: torch.export.Dim("seq")}, "text": {0: "batch", 1: "memory"}},
    ],
)
def test_free_axes_are_given_by_name(dynamic: dict[str, object]) -> None:
    found = inputs_from_examples(TwoInputs(), "mine", (STATES, torch.zeros(2, 5, 32)), dynamic)
    assert [one.dims for one in found.inputs] == [("batch", "seq", 32), ("batch", "memory", 32)]
    assert found.sizes == {"seq": 9, "memory": 5}
    assert found.axes == ("batch", "seq", "memory")


def test_examples_are_repeated_or_cut_off_for_other_sizes() -> None:
    example = torch.arange(6.0).reshape(1, 3, 2)
    found = inputs_from_examples(Model(), "mine", example)
    longer, *_ = found.tensors({"batch": 2, "seq": 4})
    assert longer.tolist() == [[[0, 1], [2, 3], [4, 5], [0, 1]]] * 2
    shorter, *_ = found.tensors({"batch": 1, "seq": 1})
    assert shorter.tolist() == [[[0, 1]]]


@pytest.mark.parametrize(
    ("examples", "dynamic", "message"),
    [
        ({"y": STATES}, None, None),  # forward takes any keyword
        ((STATES, STATES, 1.0, STATES), None, "was given 4 example inputs, but its forward takes: x, mask, scale, oth"),
        ({"x": [1.0]}, None, "example input 'x' of mine is a list; expected a tensor, a number or None"),
        ({"scale": 1.0}, None, "hold no tensor; expected one for each input"),
        ({"x": STATES.to(torch.complex64)}, None, "'x' is complex64; expected floats, int64, int32, uint8 or bool"),
        (
            {"x": STATES, "mask": TOKENS[:, :5]},
            {"x": {1: "seq"}, "mask": {1: "seq"}},
            "the axis seq of mine is 9 in .*",
        ),
        ({"x": STATES}, {"y": {0: "batch"}}, "dynamic names 'y'.*Inputs: x"),
        ({"x": STATES}, {"x": {3: "seq"}}, r"dynamic\['x'\] has axis 3; expected names by axis"),
        ({"x": STATES}, {"x": 3}, r"dynamic\['x'\] is 3; expected names by axis"),
    ],
)
def test_wrong_examples_are_named_with_what_was_expected(
    examples: Any, dynamic: dict[str, object] | None, message: str | None
) -> None:
    if message is None:
        inputs_from_examples(Model(), "mine", examples, dynamic)
        return
    with pytest.raises(SpecError, match=message):
        inputs_from_examples(Model(), "mine", examples, dynamic)


def test_an_example_of_an_argument_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"an example of 'imag'; did you mean 'image'\?.*forward takes: image, text"):
        inputs_from_examples(TwoInputs(), "mine", {"imag": STATES})


TABLE: dict[str, Any] = {
    "inputs": {
        "x": {"dims": ["batch", "seq", 32]},
        "tokens": {"dims": ["batch", "memory"], "dtype": "int64", "range": [1, 50]},
        "mask": {"dims": ["batch", "seq"], "dtype": "bool", "mask": "ignore"},
    },
    "sizes": {"seq": 100, "memory": 7},
    "constants": {"scale": 2.0},
}


def test_a_table_describes_every_input() -> None:
    found = inputs_from_table(Model(), "mine", TABLE)
    assert found.inputs == (
        ModuleInput(name="x", dims=("batch", "seq", 32)),
        ModuleInput(name="tokens", dims=("batch", "memory"), dtype="int64", low=1, high=50),
        ModuleInput(name="mask", dims=("batch", "seq"), dtype="bool", mask="ignore"),
    )
    assert (found.sizes, found.constants) == ({"seq": 100, "memory": 7}, {"scale": 2.0})
    x, tokens, mask = found.tensors({"batch": 1, "seq": 3, "memory": 2})
    assert (tuple(x.shape), tokens.tolist(), mask.tolist()) == ((1, 3, 32), [[1, 1]], [[False] * 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": {}}, "the inputs file has 'input'; did you mean 'inputs'"),
        ({"inputs": {}}, r"names no input; expected a table for each, such as \[inputs.x\] with dims"),
        ({"inputs": {"x": 3}}, r"\[inputs.x\] is 3; expected a table with dims"),
        ({"inputs": {"x": {"shape": [1]}}}, r"\[inputs.x\] has 'shape'.*Keys: dims, dtype, range, mask"),
        ({"inputs": {"x": {"dims": "batch"}}}, "dims is 'batch'; expected sizes and names of axes"),
        ({"inputs": {"x": {"dims": ["batch", 0]}}}, "expected sizes and names of axes"),
        ({"inputs": {"x": {"dims": ["batch", True]}}}, "expected sizes and names of axes"),
        ({"inputs": {"x": {"dims": ["batch"], "dtype": "int8"}}}, "dtype is 'int8'; expected one of: float, int64"),
        ({"inputs": {"x": {"dims": ["batch"], "mask": "yes"}}}, "mask is 'yes'; expected keep or ignore"),
        ({"inputs": {"x": {"dims": ["batch"], "mask": "keep"}}}, "a mask of tokens has the axes batch, seq"),
        ({"inputs": {"x": {"dims": ["batch"], "range": [0, 2]}}}, "range belongs to integers, not to float"),
        ({"inputs": {"x": {"dims": ["batch"], "dtype": "int64", "range": [2, 2]}}}, r"range is \[2, 2\]; expected"),
        ({"inputs": {"x": {"dims": ["batch"], "dtype": "int64", "range": [0.5, 2]}}}, "range is .*; expected"),
        ({"inputs": {"x": {"dims": ["batch", "n"]}}, "sizes": {}}, r"the axis n has no size; add it under \[sizes\]"),
        ({"sizes": {"sq": 3}}, r"sizes names 'sq'.*Axes: batch, seq, memory"),
        ({"sizes": {"seq": 0, "memory": 7}}, "the size of seq is 0; expected a positive integer"),
    ],
)
def test_a_wrong_table_is_named_with_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        inputs_from_table(Model(), "mine", {**TABLE, **change})


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return self.embed(x)


def test_a_single_argument_may_be_tokens_or_vectors() -> None:
    tokens, vectors = inputs_from_signature(Tokens(), "mine", [8])
    assert tokens.inputs == (ModuleInput(name="x", dims=("batch", "seq"), dtype="int64"),)
    assert vectors.inputs == (ModuleInput(name="x", dims=("batch", "seq", 8)),)


def test_a_signature_of_several_arguments_needs_examples() -> None:
    with pytest.raises(SpecError, match=r"forward of mine takes image, text; describe the inputs: return \(model, {"):
        list(inputs_from_signature(TwoInputs(), "mine", [8]))


def test_a_signature_of_one_argument_needs_examples_if_no_layer_tells_its_sizes() -> None:
    with pytest.raises(SpecError, match="forward of mine takes input of unknown sizes; describe the inputs: return"):
        list(inputs_from_signature(nn.Linear(13, 7), "mine", []))


def test_an_input_that_no_machine_holds_is_refused_before_it_is_made() -> None:
    inputs = ModuleInputs(inputs=(ModuleInput(name="x", dims=("batch", 2**40)),))
    with pytest.raises(SpecError, match="x would have 3,298,534,883,328 elements; expected at most 2,147,483,647"):
        list(inputs.tensors({"batch": 3}))
