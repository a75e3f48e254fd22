"""BigBird checkpoints: config.json → spec → module, against transformers with the same weights."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from originals import error_against_original, kept_error, module_from_weights, spec_from_config, token_inputs
from slow_cases import slow_after
from transformers_models import oracle_from_config

from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.big_bird_spec import BigBirdSpec
from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

# Largest error over RMS: float32 sums in another order, which attention amplifies.
LIMIT = 2e-5
# The same in float64, for configurations that amplify more.
EXACT = 1e-10
SEPARATOR = 5
TINY: dict[str, Any] = {
    "model_type": "big_bird",
    "vocab_size": 41,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 1024,
    "block_size": 4,
    "num_random_blocks": 2,
    "sep_token_id": SEPARATOR,
}
# of these sizes, 36 tokens are the most with full attention
FULL = 36
LENGTHS = (1, 4, 19, FULL, FULL + 1, 40, 62, 203, 1001)
TASKS = list(BigBirdSpec.TASKS)


def config_of(task: str = "base", **fields: Any) -> dict[str, Any]:
    """A config.json; fields given as "absent" are left out."""
    config = {**TINY, "architectures": [BigBirdSpec.TASKS[task]], **fields}
    return {name: value for name, value in config.items() if value != "absent"}


def spec_of(task: str = "base", **fields: Any) -> BigBirdSpec:
    spec = spec_from_config(config_of(task, **fields))
    assert isinstance(spec, BigBirdSpec)
    return spec


@pytest.mark.parametrize("attention_type", ["block_sparse", "original_full"])
def test_any_length_equals_transformers(attention_type: str) -> None:
    assert error_against_original(config_of(attention_type=attention_type), LENGTHS) <= LIMIT


def test_the_lengths_of_the_first_plans_equal_transformers() -> None:
    """transformers has a branch of its own for these."""
    config = config_of(max_position_embeddings=4096, block_size=64, num_random_blocks=3, num_hidden_layers=1)
    assert error_against_original(config, (1024, 3072)) <= LIMIT


@pytest.mark.parametrize("task", TASKS)
def test_every_task_equals_transformers(task: str) -> None:
    config = config_of(task, id2label={"0": "a", "1": "b", "2": "c"})
    assert error_against_original(config, (1, 20, 70)) <= LIMIT


def random_config(draw: random.Random) -> dict[str, Any]:
    heads, task = draw.choice([1, 2, 3]), draw.choice(TASKS)
    fields: dict[str, Any] = {
        "vocab_size": draw.randint(10, 60),
        "hidden_size": heads * draw.choice([2, 5, 16]),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 40),
        "hidden_act": draw.choice(list(HIDDEN_ACTS)),
        "max_position_embeddings": draw.choice([100, 320]),
        "type_vocab_size": draw.randint(2, 3),
        "layer_norm_eps": draw.choice([1e-5, 1e-12, 1e-3]),
        "attention_type": draw.choice(["block_sparse", "block_sparse", "original_full"]),
        "use_bias": draw.choice([True, False]),
        "rescale_embeddings": draw.choice([True, False]),
        "block_size": draw.choice([1, 2, 4, 5, 10, 16]),
        "num_random_blocks": draw.randint(1, 3),
        "tie_word_embeddings": draw.choice([True, False]),
        "pad_token_id": draw.randint(0, 9),
        "id2label": {str(i): f"L{i}" for i in range(draw.randint(1, 4))},
        "chunk_size_feed_forward": draw.choice([0, 1]),
    }
    return config_of(task, **fields)


@pytest.mark.parametrize("seed", slow_after(5, range(20)))
def test_random_configurations_equal_transformers(seed: int) -> None:
    draw = random.Random(seed)
    config = random_config(draw)
    # transformers needs positions for its padding, too
    longest = config["max_position_embeddings"] // config["block_size"] * config["block_size"]
    lengths = (draw.randint(1, 20), draw.randint(20, longest), longest)
    assert error_against_original(config, lengths, seed, torch.float64) <= EXACT


@torch.no_grad()
def test_holes_and_left_padding_equal_transformers_in_every_row() -> None:
    """In long sequences, padding has a context of zeros, also where it is the first token, which heads read."""
    for task, seq_len in (("base", 62), ("base", FULL), ("sequence-classification", 62), ("multiple-choice", 62)):
        config = config_of(task)
        original, spec = oracle_from_config(config), spec_from_config(config)
        module, inputs = module_from_weights(spec, original.state_dict()), token_inputs(spec, 3, seq_len)
        inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
        inputs["attention_mask"][0, ..., 7:30:3] = 0
        expected = original(**inputs)
        for fused in (False, True):
            with fused_operators(module, fused):
                actual = module(*inputs.values())
            everywhere = inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}
            assert kept_error(spec, everywhere, actual, expected) <= LIMIT


@torch.no_grad()
def test_the_logits_of_a_question_are_lowered_and_all_others_are_equal() -> None:
    """The separator first, in the middle, twice and nowhere. Types of tokens follow from it."""
    config = config_of("question-answering")
    original, spec = oracle_from_config(config), spec_from_config(config)
    module, inputs = module_from_weights(spec, original.state_dict()), token_inputs(spec, 4, 50, padded=False)
    ids = inputs["input_ids"]
    ids[ids == SEPARATOR] = 0
    ids[0, 0] = ids[1, 7] = ids[2, 3] = ids[2, 20] = SEPARATOR
    expected = original(**inputs)
    for name, logits in zip(spec.outputs, module(*inputs.values()), strict=True):
        is_lowered = expected[name] < -1e5
        assert is_lowered.sum(dim=1).tolist() == [0, 7, 3, 0]
        assert torch.equal(is_lowered, logits < -1e5)
        rms = expected[name][~is_lowered].square().mean().sqrt()
        assert float((logits - expected[name])[~is_lowered].abs().max() / rms) <= LIMIT


@torch.no_grad()
def test_a_short_sequence_changes_no_later_one() -> None:
    """A model of transformers that has met one has full attention for good."""
    config = config_of()
    original, spec = oracle_from_config(config), spec_from_config(config)
    module = module_from_weights(spec, original.state_dict())
    short, long = token_inputs(spec, 1, 20), token_inputs(spec, 1, 200)
    expected = original(**long)
    original(**short)
    module(*short.values())
    assert kept_error(spec, long, module(*long.values()), expected) <= LIMIT
    assert kept_error(spec, long, module(*long.values()), original(**long)) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("saved_task", ["base", "masked-lm", "question-answering"])
def test_the_base_loads_from_base_and_head_checkpoints(saved_task: str) -> None:
    original = oracle_from_config(config_of(saved_task))
    spec = spec_from_config(config_of(saved_task), {"task": "base"})
    module, inputs = module_from_weights(spec, original.state_dict()), token_inputs(spec, 2, 60)
    base = original if saved_task == "base" else original.bert
    assert ("pooler_output" in spec.outputs) == (saved_task != "question-answering")
    assert kept_error(spec, inputs, module(*inputs.values()), base(**inputs)) <= LIMIT


@torch.no_grad()
def test_a_checkpoint_of_pretraining_is_a_language_model() -> None:
    config = config_of() | {"architectures": ["BigBirdForPreTraining"]}
    original, spec = oracle_from_config(config), spec_from_config(config)
    assert spec.task == "masked-lm"
    module, inputs = module_from_weights(spec, original.state_dict()), token_inputs(spec, 2, 60)
    expected = {"logits": original(**inputs).prediction_logits}
    assert kept_error(spec, inputs, module(*inputs.values()), expected) <= LIMIT
    assert "head for next sentences" in "\n".join(BigBirdSpec.from_config(config, {})[1])


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_batch_and_length_stay_dynamic_in_an_exported_program(fused: bool) -> None:
    config = config_of("multiple-choice")
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config).state_dict())
    dynamic = tuple(dict.fromkeys(range(len(dims)), torch.export.Dim.DYNAMIC) for dims in spec.inputs.values())
    with fused_operators(module, fused):
        example = tuple(token_inputs(spec, 2, 200).values())
        program = torch.export.export(module, example, dynamic_shapes=dynamic).module()
    for batch, seq_len in ((2, 2), (3, FULL), (2, FULL + 1), (4, 300)):
        inputs = token_inputs(spec, batch, seq_len)
        expected = {"logits": module(*inputs.values())}
        assert kept_error(spec, inputs, program(*inputs.values()), expected) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("task", ["base", "question-answering"])
def test_half_precision_modules_run(task: str, dtype: torch.dtype) -> None:
    config = config_of(task, sep_token_id=40)
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config).state_dict())
    inputs = token_inputs(spec, 2, 60)
    inputs["input_ids"] %= 40  # no question, whose logits would outweigh all others
    expected = module(*inputs.values())[0]
    actual = module.to(dtype)(*inputs.values())[0]
    assert actual.dtype == (torch.float32 if task == "question-answering" else dtype)
    error = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # rounding of weights by 2^-11 or 2^-8, multiplied by two layers and the head
    assert float(error) <= (2e-2 if dtype == torch.float16 else 1e-1)


def test_gradients_reach_all_weights_also_with_padding() -> None:
    config = config_of("token-classification")
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config).state_dict())
    inputs = token_inputs(spec, 2, 60)
    module(*inputs.values())[inputs["attention_mask"] == 1].sum().backward()
    assert all(torch.isfinite(weight.grad).all() and weight.grad.abs().max() > 0 for weight in module.parameters())


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    written = json.loads(transformers.BigBirdConfig(architectures=["BigBirdModel"]).to_json_string())
    spec = spec_from_config({"model_type": "big_bird", "architectures": ["BigBirdModel"]})
    assert spec == BigBirdSpec(seq_len=4096)
    assert spec_from_config(written) == spec
    assert spec_from_config(transformers.BigBirdConfig(architectures=["BigBirdModel"]).to_dict()) == spec


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("multiple-choice")
    assert list(spec.inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert (spec.custom_ops(fused=True), spec.custom_ops(fused=False)) == ({"BandedAttention": 2}, {})
    assert (spec.seq_len, spec.max_seq_len, spec.full_len) == (1024, 1024, FULL)
    assert "the padded length is part of the input" in spec.why_samples_mix
    for full in (spec_of(attention_type="original_full"), spec_of(max_position_embeddings=FULL)):
        assert full.custom_ops(fused=True) == {"MaskedAttention": 2}
        assert full.why_not_invariant == ""
    answers = spec_of("question-answering", id2label={"0": "a", "1": "b", "2": "c"})
    assert list(answers.inputs) == ["input_ids", "attention_mask"]
    assert answers.element_types == {"start_logits": "float32", "end_logits": "float32"}


def test_notes_name_what_is_not_as_the_paper_says() -> None:
    notes = "\n".join(BigBirdSpec.from_config(config_of(), {})[1])
    assert f"= {FULL} tokens attention is full" in notes
    assert "There are no random blocks" in notes
    assert "its keys count 3 times" in notes
    assert "The last 4 places" in notes
    assert BigBirdSpec.from_config(config_of(attention_type="original_full"), {})[1] == ()
    answers = "\n".join(BigBirdSpec.from_config(config_of("question-answering"), {})[1])
    assert f"up to the first sep_token_id {SEPARATOR}, are lowered by 1e6" in answers


def test_a_longer_sequence_is_refused() -> None:
    spec = spec_of()
    module = module_from_weights(spec, oracle_from_config(config_of()).state_dict())
    with pytest.raises(SpecError, match="the sequence has 1025 tokens; expected at most 1024"):
        module(*token_inputs(spec, 1, 1025).values())
    with pytest.raises(SpecError, match="seq_len is 1025; this checkpoint has positions for 1 to 1024"):
        spec_from_config(config_of(), {"seq_len": 1025})


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        ("base", {"hidden_act": "selu"}, "hidden_act is 'selu'.*Supported: gelu, "),
        ("base", {"num_attention_heads": 5}, "hidden_size 24 cannot be split into 5 heads"),
        (
            "base",
            {"attention_type": "sparse"},
            "attention_type is 'sparse'; expected one of block_sparse, original_full",
        ),
        ("base", {"num_random_blocks": 0}, "num_random_blocks is 0, with which transformers cannot run long sequences"),
        ("base", {"block_size": 0}, "block_size is 0, with which transformers cannot run long sequences"),
        ("base", {"is_decoder": True}, "is_decoder is true.*tokens see later ones"),
        ("base", {"pruned_heads": {"0": [1]}}, "pruned_heads is .*expected none"),
        ("base", {"architectures": ["BigBirdForCausalLM"]}, "architectures is .*BigBirdModel.*choose a task"),
        ("question-answering", {"sep_token_id": None}, "sep_token_id is None and type_vocab_size 2; the task question"),
        ("question-answering", {"type_vocab_size": 1}, "sep_token_id is 5 and type_vocab_size 1; the task question"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_reason(
    task: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as failure:
        spec_of(task, **fields)
    assert "\n" not in str(failure.value)
