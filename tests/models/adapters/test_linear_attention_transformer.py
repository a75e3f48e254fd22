"""Layers and models of linear-attention-transformer 0.19.1 against our layers in their place."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import relative_error
from exported_layers import OnnxFile, padded_mask, trained_like
from torch import Tensor, nn

from effexport.models.adapters.replace import with_our_layers
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import LinearAttention
from effexport.models.variants.local import LocalSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "foreign")

SEQ_LEN = 128
LENGTHS = [1, 63, 100, 1000]  # and 1000 is longer than SEQ_LEN
LONGEST = 1024  # of the language models: their positions
# The acceptance limit is 1e-4. Both compute in float32, with sums of up to 1000 products in another order.
TOLERANCE = 2e-5

# Options of SelfAttention, and the lengths that the original takes.
LAYERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "default": ({}, LENGTHS),
    "wide heads": ({"dim_head": 24}, LENGTHS),
    "causal": ({"causal": True}, LENGTHS),
    "causal, wide heads": ({"causal": True, "dim_head": 24}, LENGTHS),
    "blindspot 4": ({"causal": True, "blindspot_size": 4}, [4, 64, 100, 1000]),
    "blindspot 50": ({"causal": True, "blindspot_size": 50}, [50, 100, 1000]),
    "blindspot 100": ({"causal": True, "blindspot_size": 100}, [100, 1000]),
    "local heads": ({"n_local_attn_heads": 3, "local_attn_window_size": 25}, [25, 100, 1000]),
    "local heads only": ({"n_local_attn_heads": 4, "local_attn_window_size": 50}, [50, 100, 1000]),
    "causal, local heads": ({"causal": True, "n_local_attn_heads": 1, "local_attn_window_size": 50}, [50, 100, 1000]),
}

# Options of LinearAttentionTransformerLM.
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": {"causal": True},
    "reversible, rotary": {"reversible": True, "use_rotary_emb": True},
    "causal, rotary, chunks": {"causal": True, "use_rotary_emb": True, "ff_chunks": 4},
    "absolute positions, shifted tokens": {"use_axial_pos_emb": False, "shift_tokens": True, "ff_glu": True},
    "other width of embeddings": {"emb_dim": 24, "causal": True},
}


def attention(**options: Any) -> nn.Module:
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    layer: nn.Module = SelfAttention(32, 4, **options).eval()
    trained_like(layer)
    return layer


class LanguageModel(nn.Module):
    """The package's language model as a function of tokens and a mask."""

    def __init__(self, **options: Any) -> None:
        from linear_attention_transformer import LinearAttentionTransformerLM

        super().__init__()
        fields: dict[str, Any] = {"num_tokens": 50, "dim": 32, "depth": 2, "max_seq_len": LONGEST, "heads": 4}
        self.model = LinearAttentionTransformerLM(**fields | {"dim_head": 8} | options)
        trained_like(self)
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, input_mask=attention_mask != 0)
        return logits


def states(batch: int, seq_len: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, seq_len, 32, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int, seq_len: int) -> Tensor:
    return torch.randint(0, 50, (batch, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("option", LAYERS)
@torch.no_grad()
def test_the_attention_layer_answers_as_the_original_with_and_without_padding(option: str) -> None:
    options, lengths = LAYERS[option]
    layer = attention(**options)
    adapted = with_our_layers(layer, SEQ_LEN)
    assert list(adapted.replaced) == [""]
    for seq_len in lengths:
        x, keep = states(3, seq_len), padded_mask(3, seq_len) != 0
        whole = torch.ones_like(keep)
        assert relative_error(adapted.module(x), layer(x), whole) <= TOLERANCE
        assert relative_error(adapted.module(x, input_mask=keep), layer(x, input_mask=keep), keep) <= TOLERANCE


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_rotary_positions_turn_queries_and_keys_before_the_feature_maps(causal: bool) -> None:
    from linear_attention_transformer.linear_attention_transformer import FixedPositionalEmbedding

    layer, x = attention(causal=causal), states(2, 100)
    adapted = with_our_layers(layer, SEQ_LEN).module
    positions = FixedPositionalEmbedding(8, 200)(x)
    expected, whole = layer(x, pos_emb=positions), torch.ones(2, 100, dtype=torch.bool)
    assert relative_error(adapted(x, pos_emb=positions), expected, whole) <= TOLERANCE
    assert relative_error(adapted(x), expected, whole) > 0.01, "positions matter"


@torch.no_grad()
def test_a_layer_that_receives_a_context_answers_as_the_original() -> None:
    layer, x, context = attention(receives_context=True), states(3, 40), states(3, 63, seed=2)
    adapted, keep = with_our_layers(layer, SEQ_LEN).module, padded_mask(3, 63) != 0
    arguments = {"context": context, "context_mask": keep}
    whole = torch.ones(3, 40, dtype=torch.bool)
    assert relative_error(adapted(x, **arguments), layer(x, **arguments), whole) <= TOLERANCE


@pytest.mark.parametrize("option", MODELS)
@torch.no_grad()
def test_the_language_model_answers_as_the_original(option: str) -> None:
    model = LanguageModel(**MODELS[option])
    adapted = with_our_layers(model, SEQ_LEN)
    replaced = {type(layer).__name__ for layer in adapted.replaced.values()}
    assert replaced - {"PositionTable"} == {"GlobalAndLocalAttention", "WholeSequence"}
    assert not adapted.kept
    for seq_len in LENGTHS:
        mask = padded_mask(2, seq_len)
        expected = model(tokens(2, seq_len), mask)
        assert relative_error(adapted.module(tokens(2, seq_len), mask), expected, mask != 0) <= TOLERANCE


@pytest.mark.parametrize(
    "option",
    [pytest.param("causal", marks=pytest.mark.slow), pytest.param("reversible, rotary", marks=pytest.mark.soak)],
)
@torch.no_grad()
def test_the_onnx_file_of_the_language_model_answers_as_the_original(option: str, tmp_path: Path) -> None:
    model = LanguageModel(**MODELS[option])
    file = OnnxFile(with_our_layers(model, LONGEST).module, LONGEST, tmp_path)
    inputs = [{"input_ids": tokens(2, n), "attention_mask": padded_mask(2, n)} for n in LENGTHS]
    for each, actual in zip(inputs, file.answers(inputs, "body"), strict=True):
        assert relative_error(actual, model(**each), each["attention_mask"] != 0) <= TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_the_onnx_file_of_local_heads_in_chunks_takes_every_length(tmp_path: Path) -> None:
    # the original takes multiples of the window only: a longer mask stands for the tokens that are missing
    model = LanguageModel(causal=True, n_local_attn_heads=2, local_attn_window_size=32, ff_chunks=3)
    file = OnnxFile(with_our_layers(model, LONGEST).module, LONGEST, tmp_path)
    inputs = [{"input_ids": tokens(2, n), "attention_mask": padded_mask(2, n)} for n in LENGTHS]
    for n, each, actual in zip(LENGTHS, inputs, file.answers(inputs, "body"), strict=True):
        pad = -n % 32
        padded = {name: nn.functional.pad(value, (0, pad)) for name, value in each.items()}
        assert relative_error(actual, model(**padded)[:, :n], each["attention_mask"] != 0) <= TOLERANCE


def test_the_specs_say_what_the_layers_compute() -> None:
    layer = attention(causal=True, blindspot_size=50, n_local_attn_heads=1, local_attn_window_size=16, dim_head=24)
    ours = with_our_layers(layer, SEQ_LEN).module
    common: dict[str, Any] = {"dim": 32, "head_dim": 24, "seq_len": SEQ_LEN, "causal": True}
    clamped: dict[str, Any] = {"eps": 0.0, "min_denominator": 1e-3, "blindspot": 50, "chunk_length": 100}
    linear, local = (part.spec for part in ours.parts)
    assert linear == LinearSpec(**common, heads=3, feature_map="softmax", **clamped)
    assert local == LocalSpec(**common, heads=1, bias=True, chunk_length=16)


def test_what_no_spec_expresses_is_kept_with_a_reason() -> None:
    context = attention(receives_context=True, causal=True)
    assert with_our_layers(context, SEQ_LEN).kept == {"": "a causal layer attends to a context"}
    context = attention(receives_context=True, n_local_attn_heads=1)
    assert "local heads attend to a context" in with_our_layers(context, SEQ_LEN).kept[""]
    patched = attention()
    patched.global_attn_fn = functools.partial(max, key=len)
    assert with_our_layers(patched, SEQ_LEN).kept == {"": "its attention function was replaced by max"}


def test_the_layers_of_one_module_stay_one_layer() -> None:
    model = LanguageModel()
    blocks = model.model.transformer.layers.layers
    blocks[1][0] = blocks[0][0]
    adapted = with_our_layers(model, SEQ_LEN).module
    assert sum(isinstance(layer, LinearAttention) for layer in adapted.modules()) == 1
