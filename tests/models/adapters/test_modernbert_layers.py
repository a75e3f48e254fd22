"""ModernBERT's attention in a user's model: ours computes what it computes, eager and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import exported, padding, random_states, trained_like
from comparison import relative_error
from torch import Tensor, nn

from effexport.models.adapters.replace import with_our_layers
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

DIM = 36
# Sums of up to 1000 float32 terms in another order: a few 1e-6 of the RMS.
CLOSE = 2e-5
BATCH = {0: "batch", 1: "seq"}


class WindowClassifier(nn.Module):
    """A user's own model with an encoder of transformers' ModernBERT inside."""

    def __init__(self, **options: Any) -> None:
        import transformers

        super().__init__()
        sizes = {"hidden_size": DIM, "num_attention_heads": 3, "intermediate_size": 20, "num_hidden_layers": 3}
        fields = sizes | {"vocab_size": 50, "pad_token_id": 0, "local_attention": 16} | options
        self.encoder = transformers.ModernBertModel(transformers.ModernBertConfig(**fields))
        self.head = nn.Linear(DIM, 5)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        encoded = self.encoder(inputs_embeds=hidden_states, attention_mask=attention_mask)
        return self.head(encoded.last_hidden_state)


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"attn_implementation": "eager"}])
def test_layers_compute_the_same(options: dict[str, Any]) -> None:
    original = trained_like(WindowClassifier(**options))
    adapted = with_our_layers(original, 100)
    assert list(adapted.replaced) == [f"encoder.layers.{layer}.attn" for layer in range(3)]
    for seq_len in (1, 9, 100, 333):
        x, keep = random_states(3, seq_len, DIM), ~padding(3, seq_len)
        with torch.inference_mode():
            expected, actual = original(x, keep.long()), adapted.module(x, keep.long())
        assert relative_error(actual, expected, keep) < CLOSE


def test_positions_that_are_given_count() -> None:
    original = trained_like(WindowClassifier()).encoder
    ours, x = with_our_layers(original, 100).module, random_states(2, 30, DIM)
    positions = torch.arange(30).flip(0).expand(2, 30)
    with torch.inference_mode():
        expected = original(inputs_embeds=x, position_ids=positions).last_hidden_state
        assert relative_error(ours(inputs_embeds=x, position_ids=positions).last_hidden_state, expected) < CLOSE


def test_frequencies_that_depend_on_the_length_keep_a_layer() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    adapted = with_our_layers(WindowClassifier(rope_scaling=scaling), 64)
    assert adapted.kept["encoder.layers.1.attn"] == "its positions are not rotations by fixed frequencies"
    linear = trained_like(WindowClassifier(rope_scaling={"rope_type": "linear", "factor": 2.0}))
    x, keep = random_states(2, 40, DIM), torch.ones(2, 40)
    with torch.inference_mode():
        assert relative_error(with_our_layers(linear, 64).module(x, keep), linear(x, keep)) < CLOSE


def test_other_masks_and_results_are_errors() -> None:
    ours = with_our_layers(WindowClassifier(), 64).module.encoder.layers[1].attn
    x, positions = random_states(2, 30, DIM), torch.arange(30)[None]
    causal = torch.full((2, 1, 30, 30), -1e30).triu(1)
    with pytest.raises(SpecError, match=r"\[2, 1, 30, 30\]; expected \[batch, 1, seq, seq\] with equal rows"):
        ours(x, attention_mask=causal, position_ids=positions)
    with pytest.raises(SpecError, match="got output_attentions"):
        ours(x, output_attentions=True, attention_mask=causal, position_ids=positions)


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_an_exported_model_computes_the_same(tmp_path: Path) -> None:
    original = trained_like(WindowClassifier())
    example = {"hidden_states": random_states(2, 48, DIM), "attention_mask": torch.ones(2, 48, dtype=torch.int64)}
    module = with_our_layers(original, 100).module
    run, counts = exported(module, example, dict.fromkeys(example, BATCH), tmp_path / "model.onnx")
    assert counts == {"MaskedAttention": 1, "BandedAttention": 2}
    for seq_len in (1, 16, 100, 333):
        x, keep = random_states(3, seq_len, DIM), ~padding(3, seq_len)
        with torch.inference_mode():
            expected = original(x, keep.long())
        assert relative_error(run(hidden_states=x, attention_mask=keep.long())[0], expected, keep) < CLOSE
