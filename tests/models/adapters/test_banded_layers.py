"""Attention in bands inside other people's models: ours computes what it computes, eager and exported."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import exported, padding, random_states, trained_like
from comparison import relative_error
from torch import Tensor, nn

import effexport
from effexport.models.adapters.adapter import NotReplaceableError
from effexport.models.adapters.local_attention import angles_at
from effexport.models.adapters.replace import with_our_layers
from effexport.models.user.spec_from_module import spec_from_module
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

# Sums of up to 1000 float32 terms in another order: a few 1e-6 of the RMS. T5's logits are ten times as large.
CLOSE = 4e-5
WORDS, DIM, BATCH = 50, 36, {0: "batch", 1: "seq"}
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
LED: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": DIM,
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("ffn_dim", 20), ("layers", 2))},
    **{f"{part}_attention_heads": 3 for part in ("encoder", "decoder")},
    "attention_window": [16, 16],
    "max_encoder_position_embeddings": 400,
}
T5: dict[str, Any] = {"vocab_size": WORDS, "d_model": DIM, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 3}
BIG_BIRD: dict[str, Any] = SIZES | {"block_size": 8, "num_random_blocks": 2, "max_position_embeddings": 400}
LONGFORMER: dict[str, Any] = SIZES | {"attention_window": [16, 16], "max_position_embeddings": 400}


def of_transformers(kind: str, **options: Any) -> Any:
    """A model of transformers, such as LEDModel, with weights as after training."""
    import transformers

    name = kind.partition("Model")[0].partition("For")[0].removesuffix("Encoder")
    return trained_like(getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options)))


@dataclass(frozen=True)
class Case:
    """A model. layers: replaced ones, models and encoders left out."""

    make: Callable[[], Any]
    layers: tuple[str, ...]
    with_globals: bool = False


def numbered(path: str) -> tuple[str, ...]:
    return tuple(path.format(layer) for layer in range(2))


CASES = {
    "Longformer": Case(
        functools.partial(of_transformers, "LongformerModel", **LONGFORMER),
        numbered("encoder.layer.{}.attention.self"),
        with_globals=True,
    ),
    "Longformer, two windows": Case(
        functools.partial(
            of_transformers, "LongformerForSequenceClassification", **LONGFORMER | {"attention_window": [16, 8]}
        ),
        numbered("longformer.encoder.layer.{}.attention.self"),
    ),
    "LED's encoder": Case(
        lambda: of_transformers("LEDModel", **LED).encoder,
        numbered("layers.{}.self_attn.longformer_self_attn"),
        with_globals=True,
    ),
    "LED": Case(
        functools.partial(of_transformers, "LEDModel", **LED),
        numbered("encoder.layers.{}.self_attn.longformer_self_attn"),
        with_globals=True,
    ),
    "BigBird": Case(
        functools.partial(of_transformers, "BigBirdModel", **BIG_BIRD),
        numbered("encoder.layer.{}.attention"),
    ),
    "BigBird, words": Case(
        functools.partial(of_transformers, "BigBirdForMaskedLM", **BIG_BIRD | {"use_bias": False}),
        numbered("bert.encoder.layer.{}.attention"),
    ),
    "LongT5": Case(
        functools.partial(of_transformers, "LongT5EncoderModel", **T5, local_radius=7),
        numbered("encoder.block.{}.layer.0.LocalSelfAttention"),
    ),
}


def inputs_of(case: Case, batch: int, seq_len: int) -> dict[str, Tensor]:
    """Words, padded in all samples but the first, and global tokens, of which padding is none."""
    generator = torch.Generator().manual_seed(seq_len)
    keep = ~padding(batch, seq_len)
    words = torch.randint(1, WORDS, (batch, seq_len), generator=generator)
    given = {"input_ids": torch.where(keep, words, 0), "attention_mask": keep.long()}
    is_global = torch.rand(batch, seq_len, generator=generator) < 0.1
    return given | ({"global_attention_mask": is_global.long()} if case.with_globals else {})


def answer(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The first output. BigBird remembers short sequences."""
    with torch.inference_mode():
        result: Tensor = copy.deepcopy(model)(**given)[0]
    return result


def kept_rows(result: Tensor, given: dict[str, Tensor]) -> Tensor | None:
    """The rows that count; None for all of them."""
    keep = given.get("attention_mask")
    return None if keep is None or result.shape[:2] != keep.shape else keep != 0


@pytest.mark.parametrize("name", CASES)
def test_models_with_our_layers_answer_as_the_originals(name: str) -> None:
    case = CASES[name]
    original = case.make()
    adapted = with_our_layers(original, 100)
    assert not adapted.kept
    assert [path for path in adapted.replaced if path.endswith(case.layers)] == list(case.layers)
    for seq_len in (1, 9, 64, 100, 333):
        padded = inputs_of(case, 3, seq_len)
        for given in (padded, {"input_ids": padded["input_ids"].clamp(min=1)}):
            expected, actual = answer(original, given), answer(adapted.module, given)
            assert relative_error(actual, expected, kept_rows(expected, given)) < CLOSE


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if "," in name else []) for name in CASES if name != "LED"]
)
def test_exported_models_answer_as_the_originals_at_any_size(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    original = case.make()
    example = inputs_of(case, 2, 100)
    module = FirstOutput(with_our_layers(original, 100).module)
    run, counts = exported(module, example, dict.fromkeys(example, BATCH), tmp_path / "model.onnx")
    assert counts["BandedAttention"] == len(case.layers)
    for seq_len in (1, 9, 64, 333):
        given = inputs_of(case, 3, seq_len)
        expected = answer(original, given)
        assert relative_error(run(**given)[0], expected, kept_rows(expected, given)) < CLOSE


class FirstOutput(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, global_attention_mask: Tensor | None = None) -> Tensor:
        marked = {} if global_attention_mask is None else {"global_attention_mask": global_attention_mask}
        result: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **marked)[0]
        return result


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_a_build_proves_a_longformer_and_says_what_was_replaced(tmp_path: Path) -> None:
    case = CASES["Longformer"]
    original = case.make()
    built = effexport.export(original, inputs_of(case, 2, 60), tmp_path / "out")
    assert built.report.verdict == "passed"
    assert built.artifact.spec.custom_ops == {"BandedAttention": 2}
    assert built.artifact.spec.inputs[0].dims == ("batch", "seq")
    assert built.report.notes[0] == (
        "transformers.models.longformer.modeling_longformer.LongformerSelfAttention runs as effexport's longformer "
        "attention, with its weights: encoder.layer.0.attention.self, encoder.layer.1.attention.self."
    )
    with effexport.load(tmp_path / "out") as model:
        for seq_len in (7, 200):
            given = inputs_of(case, 3, seq_len)
            outputs = model.run({name: value.numpy() for name, value in given.items()})
            expected = answer(original, given)
            actual = torch.from_numpy(outputs["last_hidden_state"])
            assert relative_error(actual, expected, kept_rows(expected, given)) < CLOSE


@pytest.mark.slow
def test_the_limit_of_a_model_that_pads_and_counts_positions_is_found() -> None:
    """A row of padding is the token that would be tried, and the original selects from its table after padding."""
    model = of_transformers("LongformerModel", **LONGFORMER | {"pad_token_id": 1, "max_position_embeddings": 90})
    spec = spec_from_module(model, "theirs", 40)
    assert (spec.longest, spec.ranges["input_ids"], spec.padding) == (88, [0, WORDS], {"input_ids": 1})


def test_what_ours_cannot_do_is_kept_with_a_reason() -> None:
    decoder = of_transformers("BigBirdModel", **BIG_BIRD, is_decoder=True)
    assert with_our_layers(decoder, 100).kept[""] == "it is a decoder"
    full = of_transformers("BigBirdModel", **BIG_BIRD, attention_type="original_full")
    assert not with_our_layers(full, 100).kept
    assert not with_our_layers(full, 100).replaced
    sums = of_transformers("LongT5EncoderModel", **T5, encoder_attention_type="transient-global")
    kept = with_our_layers(sums, 100).kept
    assert "sums of 16 neighbouring tokens" in kept["encoder.block.0.layer.0.TransientGlobalSelfAttention"]


@pytest.mark.parametrize("name", ["Longformer", "LED's encoder", "BigBird", "LongT5"])
def test_attention_weights_are_refused(name: str) -> None:
    case = CASES[name]
    ours = with_our_layers(case.make(), 100).module
    with pytest.raises(SpecError, match=r"got output_attentions"):
        ours(**inputs_of(case, 2, 30), output_attentions=True)


def test_weights_of_a_longformer_end_the_build_with_a_remedy(tmp_path: Path) -> None:
    case = CASES["Longformer"]
    model = case.make()
    model.config.output_attentions = True
    with pytest.raises(effexport.UserError, match=r"got output_attentions, .* leave it out, as the original cannot be"):
        effexport.export(model, inputs_of(case, 2, 30), tmp_path / "out")


def test_a_derived_model_still_pads() -> None:
    case = CASES["Longformer"]
    original = case.make()
    original.__class__ = type("Derived", (type(original),), {"__module__": "theirs"})
    adapted = with_our_layers(original, 100)
    assert "its class is derived from" in adapted.kept[""]
    given = inputs_of(case, 2, 41)
    expected = answer(original, given)
    assert relative_error(answer(adapted.module, given), expected, kept_rows(expected, given)) < CLOSE


def test_hidden_states_are_those_of_the_original() -> None:
    for name in ("Longformer", "LED's encoder"):
        case = CASES[name]
        original, given = case.make(), inputs_of(case, 2, 30)
        with torch.inference_mode():
            options: dict[str, Any] = {"output_hidden_states": True, "return_dict": False}
            expected, actual = (model(**given, **options) for model in (original, with_our_layers(original, 30).module))
        assert len(actual) == len(expected)
        for one, other in zip(actual[-1], expected[-1], strict=True):
            assert relative_error(one, other, given["attention_mask"] != 0) < CLOSE


def test_a_local_layer_of_long_t5_takes_biases_of_the_original() -> None:
    original = CASES["LongT5"].make()
    first, second = (block.layer[0].LocalSelfAttention for block in original.encoder.block)
    x, mask = random_states(2, 40, DIM), torch.ones(2, 40)
    from transformers.models.longt5.modeling_longt5 import _get_local_attention_mask

    pairs = _get_local_attention_mask(mask, 8, mask.device)
    ours = with_our_layers(second, 40).module
    with torch.inference_mode():
        bias = first(x, mask=pairs)[1]
        expected = second(x, mask=pairs, position_bias=bias)[0]
        assert relative_error(ours(x, mask=pairs, position_bias=bias)[0], expected) < CLOSE
    with pytest.raises(NotReplaceableError, match="without the mask"):
        ours(x)


# Options of LocalAttention in windows of 16 tokens.
WINDOWS: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": {"causal": True},
    "causal, exact": {"causal": True, "exact_windowsize": True, "look_backward": 2},
    "exact": {"exact_windowsize": True},
    "own window": {"look_backward": 0, "look_forward": 0},
    "forward": {"look_backward": 0, "look_forward": 2, "scale": 0.5},
    "no rotation": {"use_rotary_pos_emb": False, "look_backward": 2},
}


@pytest.mark.requires("foreign")
@pytest.mark.parametrize(("name", "autopad"), itertools.product(WINDOWS, [False, True]))
def test_windows_of_local_attention(name: str, autopad: bool) -> None:
    from local_attention import LocalAttention

    original = LocalAttention(16, dim=8, autopad=autopad, **WINDOWS[name]).eval()
    adapted = with_our_layers(original, 64)
    assert list(adapted.replaced) == [""]
    for seq_len in (16, 272) + ((1, 15, 100) if autopad else ()):
        q, k, v = (random_states(2, 3, seq_len, size) * 1.5 for size in (8, 8, 8))
        keep = ~padding(2, seq_len)
        for mask, where in ((None, None), (keep, keep[:, None].expand(-1, 3, -1))):
            expected, actual = (model(q, k, v, mask=mask) for model in (original, adapted.module))
            assert relative_error(actual, expected, where) < CLOSE
            # batch and heads in one axis
            expected, actual = (
                model(*(x.flatten(0, 1) for x in (q, k, v)), mask=mask) for model in (original, adapted.module)
            )
            assert relative_error(actual, expected, None if where is None else where.flatten(0, 1)) < CLOSE


@pytest.mark.requires("foreign")
def test_options_of_local_attention_that_ours_lacks_keep_it() -> None:
    from local_attention import LocalAttention

    kept = {
        name: with_our_layers(LocalAttention(16, dim=8, **{name: True}), 64).kept for name in ("shared_qk", "use_xpos")
    }
    assert kept["shared_qk"] == {"": "with shared_qk, a token sees itself only if it sees no other"}
    assert "grow and shrink with their positions" in kept["use_xpos"][""]
    ours, x = with_our_layers(LocalAttention(16, dim=8), 64).module, random_states(1, 2, 32, 8)
    with pytest.raises(NotReplaceableError, match="called with attn_bias"):
        ours(x, x, x, attn_bias=torch.zeros(2, 16, 48))


def test_angles_are_exact_at_any_position() -> None:
    frequencies = [10000.0 ** (-i / 32) for i in range(32)]
    position = torch.cat((torch.arange(0, 9000, 7), torch.arange(1_000_000, 1_000_100)))
    angles = angles_at(position, frequencies).double()
    exact = position.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    for function in (torch.sin, torch.cos):
        assert (function(angles) - function(exact)).abs().max() < 2e-6


@pytest.mark.slow
@pytest.mark.requires("foreign", "onnx", "ort")
@pytest.mark.parametrize("causal", [False, True])
def test_an_exported_layer_of_a_local_transformer_takes_every_length(causal: bool, tmp_path: Path) -> None:
    from local_attention import LocalMHA

    sizes: dict[str, Any] = {"dim": DIM, "dim_head": 12, "heads": 3, "prenorm": True}
    original = trained_like(LocalMHA(**sizes, window_size=16, causal=causal))
    module = with_our_layers(original, 100).module
    run, counts = exported(module, {"x": random_states(2, 100, DIM)}, {"x": BATCH}, tmp_path / "model.onnx")
    assert counts == {"BandedAttention": 1}
    for seq_len in (1, 9, 64, 333):
        x = random_states(3, seq_len, DIM)
        with torch.inference_mode():
            assert relative_error(run(x=x)[0], original(x)) < CLOSE
