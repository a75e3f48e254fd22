"""Layers of pytorch-fast-transformers 0.4 against our layers in their place.

The package has to be compiled. If it is installed, it is the oracle; otherwise stand-ins are, which follow its formulas
and have its names and attributes.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fast_transformers_standin
import pytest
import torch
import torch.nn.functional as F
from comparison import relative_error
from exported_layers import OnnxFile, padded_mask, trained_like
from slow_cases import slow_after
from torch import Tensor, nn

from effexport.models.adapters.replace import with_our_layers
from effexport.models.layers import AttentionLayer
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.softmax import SoftmaxSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

SEQ_LEN = 128
LENGTHS = [1, 63, 100, 1000]  # and 1000 is longer than SEQ_LEN
# The acceptance limit is 1e-4. Both compute in float32, with sums of up to 1000 products in another order.
TOLERANCE = 2e-5


def package() -> Any:
    """The classes of the installed package by name, or the stand-ins."""
    if importlib.util.find_spec("fast_transformers") is None:
        return fast_transformers_standin
    modules = ("attention", "masking", "feature_maps", "feature_maps.base", "transformers")
    found = SimpleNamespace()
    for name in modules:
        vars(found).update(vars(importlib.import_module(f"fast_transformers.{name}")))
    return found


FT = package()


def activation(function: Any) -> Any:
    """The argument `feature_map` of linear attention for a function of each channel."""
    return FT.ActivationFunctionFeatureMap.factory(function)


# Inner attentions by name, for 8 channels of keys, and what our spec says of them.
ATTENTIONS: dict[str, tuple[Any, dict[str, object]]] = {
    "linear": (lambda: FT.LinearAttention(8), {}),
    "linear, eps": (lambda: FT.LinearAttention(8, eps=0.5), {"eps": 0.5}),
    "linear, relu": (lambda: FT.LinearAttention(8, activation(F.relu)), {"feature_map": "relu"}),
    "linear, exp": (lambda: FT.LinearAttention(8, activation(torch.exp)), {"feature_map": "exp"}),
    "linear, elu of the user": (lambda: FT.LinearAttention(8, activation(lambda x: 1 + F.elu(x))), {}),
    "causal": (lambda: FT.CausalLinearAttention(8), {"causal": True}),
    "causal, relu": (
        lambda: FT.CausalLinearAttention(8, activation(torch.relu)),
        {"causal": True, "feature_map": "relu"},
    ),
}


class Encoder(nn.Module):
    """Two encoder layers as a function of hidden states and a mask."""

    def __init__(self, attention: Any, *, causal: bool, lengths: bool = True, **options: Any) -> None:
        super().__init__()
        layers = [
            FT.TransformerEncoderLayer(FT.AttentionLayer(attention(), 32, 4, **options), 32, 64, activation="gelu")
            for _ in range(2)
        ]
        self.encoder = FT.TransformerEncoder(layers, nn.LayerNorm(32))
        self.causal, self.lengths = causal, lengths
        trained_like(self)
        self.eval()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        seq_len = hidden_states.shape[1]
        lengths = FT.LengthMask(attention_mask.sum(dim=1), max_len=seq_len) if self.lengths else None
        mask = FT.TriangularCausalMask(seq_len) if self.causal else None
        encoded: Tensor = self.encoder(hidden_states, attn_mask=mask, length_mask=lengths)
        return encoded


def states(batch: int, seq_len: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, seq_len, 32, generator=torch.Generator().manual_seed(seed))


def layer_of(attention: nn.Module, **options: Any) -> nn.Module:
    layer: nn.Module = FT.AttentionLayer(attention, 32, 4, **options)
    trained_like(layer)
    return layer.eval()


def assert_equal_at_all_lengths(model: Encoder) -> None:
    adapted = with_our_layers(model, SEQ_LEN)
    assert len(adapted.replaced) == 5, "the encoder, two layers and their attentions"
    assert not adapted.kept
    for seq_len in LENGTHS:
        x, mask = states(3, seq_len), padded_mask(3, seq_len)
        keep = mask != 0 if model.lengths else torch.ones_like(mask, dtype=torch.bool)
        assert relative_error(adapted.module(x, mask), model(x, mask), keep) <= TOLERANCE


@pytest.mark.parametrize("name", ATTENTIONS)
@torch.no_grad()
def test_an_encoder_with_linear_attention_answers_as_the_original(name: str) -> None:
    make, fields = ATTENTIONS[name]
    model = Encoder(make, causal="causal" in fields)
    assert_equal_at_all_lengths(model)
    ours = [layer for layer in with_our_layers(model, SEQ_LEN).module.modules() if isinstance(layer, AttentionLayer)]
    expected = LinearSpec(dim=32, heads=4, head_dim=8, seq_len=SEQ_LEN, **fields)
    assert [layer.spec for layer in ours] == [expected, expected]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.1])
@torch.no_grad()
def test_an_encoder_with_full_attention_answers_as_the_original(causal: bool, temperature: float | None) -> None:
    assert_equal_at_all_lengths(Encoder(lambda: FT.FullAttention(softmax_temp=temperature), causal=causal))


@torch.no_grad()
def test_an_encoder_makes_the_masks_that_are_missing() -> None:
    assert_equal_at_all_lengths(Encoder(lambda: FT.LinearAttention(8), causal=False, lengths=False))


@pytest.mark.parametrize("attention", ["LinearAttention", "FullAttention"])
@torch.no_grad()
def test_queries_may_have_keys_of_another_length_and_width(attention: str) -> None:
    inner = FT.FullAttention() if attention == "FullAttention" else FT.LinearAttention(8)
    layer = layer_of(inner, d_keys=8, d_values=12)
    layer.key_projection, layer.value_projection = nn.Linear(48, 32), nn.Linear(48, 48)
    memory, keep = torch.randn(3, 63, 48, generator=torch.Generator().manual_seed(2)), padded_mask(3, 63)
    masks = (FT.FullMask(40, 63), FT.FullMask(3, 40), FT.LengthMask(keep.sum(dim=1), max_len=63))
    adapted, whole = with_our_layers(layer, SEQ_LEN).module, torch.ones(3, 40, dtype=torch.bool)
    expected = layer(states(3, 40), memory, memory, *masks)
    assert relative_error(adapted(states(3, 40), memory, memory, *masks), expected, whole) <= TOLERANCE


ONNX_CASES: dict[str, tuple[Any, bool, dict[str, int]]] = {
    "linear": (lambda: FT.LinearAttention(8), False, {"EluLinearAttention": 2}),
    "causal": (lambda: FT.CausalLinearAttention(8), True, {"EluLinearAttention": 2}),
    "causal, relu": (lambda: FT.CausalLinearAttention(8, activation(F.relu)), True, {"EluLinearAttention": 2}),
    "full": (lambda: FT.FullAttention(), False, {"MaskedAttention": 2}),
    "full, causal": (lambda: FT.FullAttention(), True, {}),
}


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        *slow_after(0, ["full"]),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("linear", "causal, relu", "full, causal")),
    ],
)
@torch.no_grad()
def test_the_onnx_file_of_an_encoder_answers_as_the_original(name: str, tmp_path: Path) -> None:
    make, causal, operators = ONNX_CASES[name]
    # masks of the user's own are objects, too; the encoder makes those that are missing
    model = Encoder(make, causal=causal, lengths=name != "full")
    file = OnnxFile(with_our_layers(model, SEQ_LEN).module, SEQ_LEN, tmp_path)
    assert file.spec.custom_ops == operators
    inputs = [{"hidden_states": states(2, n), "attention_mask": padded_mask(2, n)} for n in LENGTHS]
    for implementation in ("auto", "body"):
        for each, actual in zip(inputs, file.answers(inputs, implementation), strict=True):
            keep = each["attention_mask"] != 0 if model.lengths else torch.ones(each["attention_mask"].shape) != 0
            assert relative_error(actual, model(**each), keep) <= TOLERANCE


def test_a_mask_of_another_shape_is_refused_as_the_original_does() -> None:
    x, lengths = states(2, 5), FT.FullMask(2, 5)
    for attention, mask, text in (
        (FT.LinearAttention(8), FT.TriangularCausalMask(5), "takes no attn_mask"),
        (FT.CausalLinearAttention(8), FT.FullMask(5), "takes a lower triangular attn_mask"),
    ):
        layer = layer_of(attention)
        with pytest.raises(RuntimeError):
            layer(x, x, x, mask, lengths, lengths)
        with pytest.raises(RuntimeError, match=text):
            with_our_layers(layer, SEQ_LEN).module(x, x, x, mask, lengths, lengths)


def test_random_features_are_kept_as_they_are() -> None:
    for options in ({}, {"deterministic_eval": True}):
        layer = layer_of(FT.LinearAttention(8, FT.RandomFourierFeatures.factory(**options)))
        assert with_our_layers(layer, SEQ_LEN).kept == {"": "its feature map is RandomFourierFeatures"}


def test_what_no_spec_expresses_is_kept_with_a_reason() -> None:
    def reason(layer: nn.Module) -> str:
        return with_our_layers(layer, SEQ_LEN).kept[""]

    other = layer_of(FT.LinearAttention(8, activation(F.softplus)))
    assert reason(other) == "its feature map is none of elu, relu, exp of each channel"
    across = layer_of(FT.LinearAttention(8, activation(lambda x: x.softmax(dim=-1))))
    assert reason(across) == "its feature map is none of elu, relu, exp of each channel"
    assert reason(layer_of(nn.Identity())) == "its attention is of the class Identity"
    wrapped = layer_of(FT.LinearAttention(8))
    wrapped.key_projection = nn.Sequential(wrapped.key_projection, nn.Tanh())
    name = "torch.nn.modules.container.Sequential"
    assert reason(wrapped) == f"its key_projection, a {name}, is not a linear layer in effect"


def test_softmax_over_the_sequence_has_the_spec_of_softmax_attention() -> None:
    layer = with_our_layers(layer_of(FT.FullAttention()), SEQ_LEN).module
    assert layer.attention.spec == SoftmaxSpec(dim=32, heads=4, head_dim=8, seq_len=SEQ_LEN)


@torch.no_grad()
def test_an_encoder_of_unknown_features_is_exported_as_it_stands(tmp_path: Path) -> None:
    model = Encoder(lambda: FT.LinearAttention(8, activation(F.softplus)), causal=False, lengths=False)
    adapted = with_our_layers(model, SEQ_LEN)
    assert len(adapted.kept) == 2
    for seq_len in LENGTHS:
        x, mask = states(2, seq_len), padded_mask(2, seq_len)
        assert torch.equal(adapted.module(x, mask), model(x, mask))
