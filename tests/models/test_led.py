"""LED checkpoints, whole and their encoder alone, beyond test_published.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from originals import PUBLISHED, both_models, config_of, error_against_original, token_inputs

from effexport.models.checkpoints.led_spec import OUTPUT, LEDSpec
from effexport.models.contract import GLOBAL_MASK
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

ENCODER = {"task": "encoder"}
TINY = config_of("led", "seq2seq-lm")


@pytest.mark.filterwarnings("ignore:The `transformers.LEDForSequenceClassification`:FutureWarning")
@pytest.mark.parametrize(
    "kind", ["LEDForConditionalGeneration", "LEDForQuestionAnswering", "LEDForSequenceClassification"]
)
def test_the_encoder_of_every_class_equals_transformers(kind: str) -> None:
    row, config = PUBLISHED["led"], TINY | {"architectures": [kind]}
    assert error_against_original(config, row.lengths[::2], dtype=row.dtype, options=ENCODER) <= row.exact


@torch.no_grad()
def test_steps_equal_the_whole_in_float64() -> None:
    _, module = both_models(TINY | {"decoder_layers": 2})
    *source, _ = token_inputs(module.double().spec, 3, 20).values()
    target = torch.randint(0, 99, (3, 30))
    expected = module(*source, target)
    empty = torch.empty(3, 4, 0, 8, dtype=torch.float64)
    memory, cache = module.memory(*source), [(empty, empty)] * 2
    for column in range(30):
        logits, cache = module.step(target[:, column : column + 1], source[1], memory, cache)
        torch.testing.assert_close(logits[:, 0], expected[:, column], rtol=0, atol=1e-12)
    with pytest.raises(SpecError, match="the decoder has 161 tokens; expected at most 160"):
        module(*source, torch.zeros(3, 161, dtype=torch.int64))


def test_the_spec_describes_the_graph() -> None:
    spec, notes = LEDSpec.from_config(TINY, ENCODER)
    assert list(spec.inputs) == ["input_ids", "attention_mask", GLOBAL_MASK]
    assert spec.outputs == {OUTPUT: ("batch", "seq", 32)}
    assert (spec.max_seq_len, spec.seq_len, spec.custom_ops(fused=True)) == (160, 160, {"BandedAttention": 2})
    assert "the encoder of LED alone: encoder_last_hidden_state of transformers' LEDModel" in notes[0]
    whole, notes = LEDSpec.from_config(TINY, {})
    assert (whole.task, whole.outputs) == ("seq2seq-lm", {"logits": ("batch", "target", 99)})
    assert whole.decoder is not None
    assert whole.decoder.cache == {f"layer0_{part}": ("batch", 4, "past", 8) for part in ("keys", "values")}
    assert "decode_step.onnx takes one token after the other, up to 160" in notes[0]


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        *(
            (
                {"architectures": given},
                {},
                "encoder and decoder are exported of LEDForConditionalGeneration only: correct it, or choose a task: "
                "encoder, the encoder alone, or seq2seq-lm$",
            )
            for given in (None, ["LEDModel"], ["LEDForQuestionAnswering"], [7])
        ),
        ({}, {"task": "base"}, "task is 'base'; led has: encoder, seq2seq-lm"),
        ({"decoder_layers": 0}, {}, "^decoder_layers is 0; expected at least 1"),
        ({"max_decoder_position_embeddings": 1}, {}, "^max_decoder_position_embeddings is 1; expected at least 2"),
        (
            {"decoder_attention_heads": 5},
            {},
            "d_model 32 cannot be split into 5 heads .*correct d_model or decoder_attention_heads in config.json",
        ),
        ({"attention_window": 3}, ENCODER, "attention_window is 3; half of it"),
        (
            {"encoder_attention_heads": 5},
            ENCODER,
            "d_model 32 cannot be split into 5 .*encoder_attention_heads in conf",
        ),
        ({"encoder_layers": 0}, ENCODER, "^encoder_layers is 0; expected at least 1"),
        ({"activation_function": "mish"}, ENCODER, "activation_function is 'mish'"),
        ({}, {**ENCODER, "seq_len": 161}, "seq_len is 161; this checkpoint has positions for 1 to 160"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(
    fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as error:
        LEDSpec.from_config(TINY | fields, options)
    assert "\n" not in str(error.value)
