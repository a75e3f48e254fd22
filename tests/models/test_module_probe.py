"""Facts that a probe of a user's own module finds: the lengths that it takes, and the axes of its outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models import attention_from_spec
from effexport.models.attention_spec import AttentionSpec
from effexport.models.checkpoints.spec import checkpoint_from_dict
from effexport.models.user.model import check_weights
from effexport.models.user.spec_from_module import Calling, model_and_spec, spec_from_module
from effexport.models.validation import SpecError
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.nystrom import NystromSpec

LINEAR = LinearSpec(dim=32, heads=2, seq_len=64)
FIXED = NystromSpec(
    dim=32, heads=2, seq_len=48, num_landmarks=8, segment_means_seq_len=48, mask_landmarks=False, pinv_init="global"
)


class OneLayer(nn.Module):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.layer = attention_from_spec(spec)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(hidden_states, attention_mask)


class TwoLayers(nn.Module):
    """A layer of 48 tokens between layers of any length, whose seq_len is 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(attention_from_spec(spec) for spec in (LINEAR, FIXED))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


class WithPositions(OneLayer):
    def __init__(self, count: int, spec: AttentionSpec = LINEAR) -> None:
        super().__init__(spec)
        self.positions = nn.Embedding(count, 32)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(hidden_states + self.positions(torch.arange(hidden_states.shape[1])), attention_mask)


class PaddedInside(OneLayer):
    """Pads to the one length of its layer, and crops."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        n = hidden_states.shape[1]
        padded = F.pad(hidden_states, (0, 0, 0, 48 - n)), F.pad(attention_mask, (0, 48 - n))
        return super().forward(*padded)[:, :n]


class Even(OneLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        pairs = hidden_states.unflatten(1, (-1, 2))
        return super().forward(pairs.flatten(1, 2), attention_mask)


def test_a_module_of_layers_of_any_length_has_no_limit() -> None:
    spec = spec_from_module(OneLayer(LINEAR), "mine")
    assert (spec.seq_len, spec.max_seq_len, spec.fixed_seq_len, spec.notes) == (64, None, None, ())
    assert spec_from_module(OneLayer(LINEAR), "mine", 300).max_seq_len is None
    assert checkpoint_from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("spec", [LINEAR, FIXED])
def test_a_number_of_classes_is_not_taken_for_the_batch(spec: AttentionSpec) -> None:
    class Classes(OneLayer):
        def __init__(self) -> None:
            super().__init__(spec)
            self.heads = nn.ModuleList(nn.Linear(32, count) for count in (3, 4, 37))

        def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
            states = super().forward(hidden_states, attention_mask)
            return tuple(head(states) for head in self.heads)

    outputs = spec_from_module(Classes(), "mine").outputs
    assert [(dims[0], dims[2]) for dims in outputs.values()] == [("batch", 3), ("batch", 4), ("batch", 37)]


def test_learned_positions_limit_the_length() -> None:
    assert spec_from_module(OneLayer(AFTFullSpec(dim=32, heads=2, seq_len=50)), "mine").max_seq_len == 50
    # of the layer, and of the module itself
    assert spec_from_module(WithPositions(64), "mine").max_seq_len == 64
    assert spec_from_module(WithPositions(500), "mine").max_seq_len == 500
    assert spec_from_module(WithPositions(9000), "mine").max_seq_len is None
    with pytest.raises(SpecError, match=r"fails on 1 × 65 tokens: index .*give a length that .* with --seq-len"):
        spec_from_module(WithPositions(64), "mine", 65)
    # of both: the layer takes 128 tokens, the module 64
    both = WithPositions(64, AFTFullSpec(dim=32, heads=2, seq_len=128))
    assert spec_from_module(both, "mine", 64).max_seq_len == 64


def test_the_limit_is_that_of_the_module_not_the_length_that_was_asked_for() -> None:
    assert spec_from_module(WithPositions(64), "mine", 60).max_seq_len == 64
    layer = OneLayer(AFTFullSpec(dim=32, heads=2, seq_len=50))
    assert spec_from_module(layer, "mine", 20).max_seq_len == 50
    with pytest.raises(SpecError, match="seq_len is 51, but a layer of mine has learned positions for a seq_len of 50"):
        spec_from_module(layer, "mine", 51)


def test_a_layer_of_one_length_makes_a_module_of_one_length() -> None:
    spec = spec_from_module(OneLayer(FIXED), "mine")
    assert (spec.seq_len, spec.max_seq_len, spec.fixed_seq_len) == (48, 48, 48)
    assert spec.inputs == {"hidden_states": ("batch", 48, 32), "attention_mask": ("batch", 48)}
    assert spec.outputs == {"output": ("batch", 48, 32)}
    assert "mine is exported for exactly 48 tokens" in spec.notes[0]
    with pytest.raises(
        SpecError, match=r"3 × 50 tokens: .*tied to segment_means_seq_len 48.*; if it takes other lengths"
    ):
        spec_from_module(OneLayer(FIXED), "mine", 50)
    assert spec_from_module(TwoLayers(), "mine").fixed_seq_len == 48


def test_a_layer_that_has_learned_one_position_makes_a_module_of_one_token() -> None:
    spec = spec_from_module(OneLayer(AFTLocalSpec(dim=32, heads=2, seq_len=1)), "mine")
    assert (spec.fixed_seq_len, spec.max_seq_len, spec.outputs) == (1, 1, {"output": ("batch", 1, 32)})
    assert spec.notes == ("mine is exported for exactly 1 token, because it does not take every length.",)


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda y: y[:, ::2], "(seq+1)//2"),
        (lambda y: y[:, :20], "min(20,seq)"),
        (lambda y: y[:, :40], "min(40,seq)"),
        (lambda y: F.pad(y, (0, 0, 1, 0)), "seq+1"),
    ],
)
def test_an_output_whose_size_follows_the_length_in_another_way_has_a_formula(
    change: Callable[[Tensor], Tensor], size: str
) -> None:
    module = OneLayer(LINEAR)
    module.register_forward_hook(lambda _, given, result: change(result))
    spec = spec_from_module(module, "mine")
    assert (spec.outputs["output"], spec.fixed_seq_len) == (("batch", size, 32), None)


def to_square(y: Tensor) -> Tensor:
    return F.pad(y, (0, 0, 0, math.isqrt(y.shape[1] - 1) ** 2 + 1))


def test_a_length_whose_output_has_no_formula_is_the_only_one() -> None:
    module = OneLayer(LINEAR)
    module.register_forward_hook(lambda _, given, result: to_square(result))
    spec = spec_from_module(module, "mine")
    assert (spec.fixed_seq_len, spec.outputs["output"]) == (64, ("batch", 64 + 50, 32))
    assert re.match(
        r"The file takes 64 tokens only: output of mine is .* for 1 × 64 tokens, but .* for a batch of 3 × 37 tokens, "
        r"and no axis of that size is a formula",
        spec.notes[-1],
    )
    examples = {"hidden_states": torch.zeros(2, 64, 32), "attention_mask": torch.ones(2, 64, dtype=torch.int64)}
    calling = Calling(examples=examples, dynamic={key: {0: "batch", 1: "seq"} for key in examples})
    with pytest.raises(SpecError, match=r"output of mine is .* but .*; expected axes that are constant, or formulas"):
        model_and_spec(module, "mine", calling=calling)


def test_a_module_that_pads_for_its_layer_takes_every_length_up_to_it() -> None:
    spec = spec_from_module(PaddedInside(FIXED), "mine")
    assert (spec.max_seq_len, spec.fixed_seq_len, spec.outputs["output"]) == (48, None, ("batch", "seq", 32))


def test_a_module_for_some_lengths_is_exported_for_the_one_that_was_asked_for() -> None:
    assert spec_from_module(Even(LINEAR), "mine").fixed_seq_len == 64
    with pytest.raises(SpecError, match=r"mine fails on 1 × 63 tokens: .*; 62 tokens work: give a length .* --seq-len"):
        spec_from_module(Even(LINEAR), "mine", 63)


def broken(value: float, *path: str) -> nn.Module:
    """A model in which the first of some numbers is another one."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(37), nn.LayerNorm(8))
    tensor = model
    for name in path:
        tensor = getattr(tensor, name)
    tensor.data.view(-1)[0] = value  # type: ignore[union-attr,operator]
    return model.eval()


@pytest.mark.parametrize(
    "path", [("0", "weight"), ("0", "bias"), ("2", "weight"), ("1", "running_var"), ("1", "weight")]
)
@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infinity")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_finite_are_named_and_counted(
    path: tuple[str, ...], value: float, what: str, dtype: torch.dtype
) -> None:
    model = broken(value, *path).to(dtype)
    count = model.state_dict()[".".join(path)].numel()
    with pytest.raises(
        SpecError, match=rf"mine has weights that are not finite: {'.'.join(path)} \({what} in 1 of {count}"
    ):
        spec_from_module(model, "mine")


class Masked(nn.Module):
    """Attention whose mask of -inf is a parameter or a buffer, beside a buffer that is not in use yet."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        mask = torch.full((64, 64), float("-inf")).triu(1)
        if parameter:
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.register_buffer("mask", mask)
        self.register_buffer("seen", torch.tensor(float("nan")))

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = self.query(hidden_states)
        n = y.shape[1]
        return (y @ y.mT + self.mask[:n, :n]).softmax(dim=-1) @ y


@pytest.mark.parametrize("parameter", [True, False])
def test_masks_of_infinity_are_no_broken_weights(parameter: bool) -> None:
    check_weights(Masked(parameter=parameter), "mine")


def test_nan_in_a_parameter_of_the_users_own_layer_is_named() -> None:
    model = Masked(parameter=True)
    model.mask.data[0] = float("nan")
    with pytest.raises(SpecError, match=r"mask \(NaN in 64 of 4,096 elements\); expected numbers"):
        check_weights(model, "mine")


def test_a_tied_weight_is_named_once_and_many_are_counted() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = shared.weight
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(SpecError) as failure:
        check_weights(model, "mine")
    assert "0.weight (NaN in 16 of 16 elements), 0.bias" in str(failure.value)
    assert "1.weight" not in str(failure.value)
    assert " and 2 more;" in str(failure.value)


def test_a_key_that_a_table_of_the_module_lacks_is_named_as_one() -> None:
    class ByLength(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * {5: 1, 6: 2}[x.shape[1]]

    with pytest.raises(SpecError, match=r"mine fails on its example inputs: KeyError: 7"):
        model_and_spec(ByLength(), "mine", calling=Calling(examples=torch.randn(2, 7, 8)))
