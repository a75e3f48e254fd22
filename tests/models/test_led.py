"""LED checkpoints, whole and their encoder alone: config.json → spec → module, against transformers with the same
weights."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import largest_error, oracle_from_config, with_weights

from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.led import IGNORED, LED, LEDEncoder, weight_names
from effexport.models.checkpoints.led_spec import OUTPUT, LEDSpec
from effexport.models.contract import GLOBAL_MASK
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

# As of Longformer: float32, added in other orders.
LIMIT = 2e-5
# As transformers' own tester of these models, with fewer words.
TINY: dict[str, Any] = {
    "model_type": "led",
    "architectures": ["LEDForConditionalGeneration"],
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_encoder_position_embeddings": 160,
    "max_decoder_position_embeddings": 160,
    "attention_window": 4,
}
ENCODER = {"task": "encoder"}
SIZES = [(1, 1), (4, 2), (3, 5), (4, 16), (3, 63), (2, 160)]


def inputs_of(batch: int, seq_len: int, vocab_size: int) -> dict[str, Tensor]:
    """Padding at the end, at the beginning, and in between, and other global tokens in each row."""
    generator = torch.Generator().manual_seed(seq_len)
    shape = (batch, seq_len)
    mask = torch.ones(shape, dtype=torch.int64)
    mask[1:2, seq_len - seq_len // 3 :] = 0
    mask[2:3, : seq_len // 3] = 0
    mask[3:4][:, torch.rand(seq_len, generator=generator) < 0.3] = 0
    ids = torch.where(mask == 1, torch.randint(3, vocab_size, shape, generator=generator), 1)
    marks = (torch.rand(shape, generator=generator) < 0.1).to(torch.int64)
    return {"input_ids": ids, "attention_mask": mask, GLOBAL_MASK: marks}


@torch.no_grad()
def error_against_transformers(config: dict[str, Any], sizes: list[tuple[int, int]], seed: int = 0) -> float:
    oracle = oracle_from_config(config, seed)
    encoder = oracle.get_submodule("encoder" if config["architectures"] == ["LEDModel"] else "led.encoder")
    spec, _ = LEDSpec.from_config(config, ENCODER)
    module = with_weights(LEDEncoder(spec), weight_names(spec), IGNORED["encoder"], oracle.state_dict())
    worst = 0.0
    for batch, seq_len in sizes:
        inputs = inputs_of(batch, seq_len, config["vocab_size"])
        without = {name: value for name, value in inputs.items() if name != GLOBAL_MASK}
        for given in (inputs, without):
            found = module(**{GLOBAL_MASK: torch.zeros_like(inputs["input_ids"]), **given})
            worst = max(worst, largest_error([found], [encoder(**given).last_hidden_state]))
    return worst


@pytest.mark.filterwarnings("ignore:The `transformers.LEDForSequenceClassification`:FutureWarning")
@pytest.mark.parametrize(
    "kind", ["LEDModel", "LEDForConditionalGeneration", "LEDForQuestionAnswering", "LEDForSequenceClassification"]
)
def test_the_encoder_of_every_class_equals_transformers(kind: str) -> None:
    assert error_against_transformers(TINY | {"architectures": [kind]}, SIZES) <= LIMIT


@torch.no_grad()
def error_of_whole(config: dict[str, Any], sizes: list[tuple[int, int, int]], seed: int = 0) -> float:
    """The largest error of the logits. sizes: samples, and tokens of the source and of the target."""
    oracle: Any = oracle_from_config(config, seed)
    oracle.final_logits_bias.copy_(torch.randn(oracle.final_logits_bias.shape))
    spec, _ = LEDSpec.from_config(config, {})
    module = with_weights(LED(spec), weight_names(spec), IGNORED[spec.task], oracle.state_dict())
    worst = 0.0
    for batch, seq_len, target_len in sizes:
        inputs = inputs_of(batch, seq_len, config["vocab_size"])
        target = torch.randint(0, config["vocab_size"], (batch, target_len))
        expected = oracle(**inputs, decoder_input_ids=target).logits
        worst = max(worst, largest_error([module(*inputs.values(), target)], [expected]))
    return worst


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_equals_transformers(tied: bool) -> None:
    sizes = [(batch, seq_len, target) for (batch, seq_len), target in zip(SIZES, (1, 7, 2, 40, 9, 160), strict=True)]
    assert error_of_whole(TINY | {"tie_word_embeddings": tied}, sizes) <= LIMIT


def random_config(seed: int) -> tuple[dict[str, Any], random.Random]:
    draw = random.Random(seed)
    heads, layers = draw.choice([1, 2, 3, 4]), draw.randint(1, 3)
    config = TINY | {
        "vocab_size": draw.randint(20, 60),
        "d_model": 12 * heads,
        "encoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": draw.randint(5, 40),
        "activation_function": draw.choice(list(HIDDEN_ACTS)),
        "attention_window": draw.choice([4, 10, 16, [draw.choice([4, 6, 12])] * layers]),
    }
    return config, draw


@pytest.mark.parametrize("seed", range(8))
def test_random_configurations_equal_transformers(seed: int) -> None:
    config, draw = random_config(seed)
    assert error_against_transformers(config, [(1, 120), (4, draw.randint(1, 120))], seed) <= LIMIT


@pytest.mark.parametrize("seed", range(8))
def test_random_configurations_with_their_decoder_equal_transformers(seed: int) -> None:
    config, draw = random_config(seed)
    # heads of 12, 6 or 4 channels
    config |= {
        "decoder_layers": draw.randint(1, 3),
        "decoder_attention_heads": config["decoder_attention_heads"] * draw.choice([1, 2, 3]),
        "decoder_ffn_dim": draw.randint(5, 40),
        "max_decoder_position_embeddings": draw.choice([40, 200]),
    }
    assert error_of_whole(config, [(1, 120, draw.randint(1, 40)), (4, draw.randint(1, 120), 40)], seed) <= LIMIT


@torch.no_grad()
def test_steps_equal_the_whole_in_float64() -> None:
    spec, _ = LEDSpec.from_config(TINY | {"decoder_layers": 2}, {})
    module = LED(spec).eval().double()
    source = tuple(inputs_of(3, 20, 99).values())
    target = torch.randint(0, 99, (3, 30))
    expected = module(*source, target)
    empty = torch.empty(3, 4, 0, 8, dtype=torch.float64)
    memory, cache = module.memory(*source), [(empty, empty)] * 2
    for column in range(30):
        logits, cache = module.step(target[:, column : column + 1], source[1], memory, cache)
        assert largest_error([logits[:, 0]], [expected[:, column]]) <= 1e-12
    with pytest.raises(SpecError, match="the decoder has 161 tokens; expected at most 160"):
        module(*source, torch.zeros(3, 161, dtype=torch.int64))


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    spec, _ = LEDSpec.from_config({}, ENCODER)
    assert spec == LEDSpec(seq_len=4096)
    assert LEDSpec.from_config(json.loads(transformers.LEDConfig().to_json_string()), ENCODER)[0] == spec
    whole, _ = LEDSpec.from_config({"architectures": ["LEDForConditionalGeneration"]}, {})
    assert whole == LEDSpec(seq_len=4096, task="seq2seq-lm")
    # which writes one window for each layer once a model is made
    everything = transformers.LEDConfig().to_dict() | {"attention_window": [512] * 12}
    assert LEDSpec.from_config(everything, ENCODER)[0].layer_specs == spec.layer_specs


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
