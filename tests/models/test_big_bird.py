"""BigBird checkpoints, beyond test_published.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from originals import LIMIT, both_models, config_of, error_of, notes_of, spec_of, token_inputs

from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

SEPARATOR = 5
# of tiny sizes, 36 tokens are the most with full attention
FULL = 36


@torch.no_grad()
def test_the_logits_of_a_question_are_lowered_and_all_others_are_equal() -> None:
    """The separator first, in the middle, twice and nowhere. Types of tokens follow from it."""
    original, module = both_models(config_of("big_bird", "question-answering"))
    spec, inputs = module.spec, token_inputs(module.spec, 4, 50, padded=False)
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
    original, module = both_models(config_of("big_bird"))
    spec = module.spec
    short, long = token_inputs(spec, 1, 20), token_inputs(spec, 1, 200)
    expected = original(**long)
    original(**short)
    module(*short.values())
    assert error_of(spec, long, module(*long.values()), expected) <= LIMIT
    assert error_of(spec, long, module(*long.values()), original(**long)) > 1e-2


@torch.no_grad()
def test_a_checkpoint_of_pretraining_is_a_language_model() -> None:
    pretraining = {"architectures": ["BigBirdForPreTraining"]}
    original, module = both_models(config_of("big_bird", **pretraining))
    assert module.spec.task == "masked-lm"
    inputs = token_inputs(module.spec, 2, 60)
    expected = {"logits": original(**inputs).prediction_logits}
    assert error_of(module.spec, inputs, module(*inputs.values()), expected) <= LIMIT
    assert "head for next sentences" in notes_of("big_bird", **pretraining)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_logits_of_a_question_stay_float32(dtype: torch.dtype) -> None:
    """Those that are lowered by 1e6 would be infinite in float16."""
    _, module = both_models(config_of("big_bird", "question-answering", sep_token_id=40))
    inputs = token_inputs(module.spec, 2, 60)
    inputs["input_ids"] %= 40  # no question, whose logits would outweigh all others
    expected, actual = (model(*inputs.values())[0] for model in (module, module.to(dtype)))
    assert actual.dtype == torch.float32
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) <= (2e-2 if dtype == torch.float16 else 1e-1)


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("big_bird", "multiple-choice")
    assert list(spec.inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert (spec.custom_ops(fused=True), spec.custom_ops(fused=False)) == ({"BandedAttention": 2}, {})
    assert (spec.seq_len, spec.max_seq_len, spec.full_len) == (1024, 1024, FULL)
    assert "the padded length is part of the input" in spec.why_samples_mix
    for full in (
        spec_of("big_bird", attention_type="original_full"),
        spec_of("big_bird", max_position_embeddings=FULL),
    ):
        assert full.custom_ops(fused=True) == {"MaskedAttention": 2}
        assert full.why_not_invariant == ""
    answers = spec_of("big_bird", "question-answering", id2label={"0": "a", "1": "b", "2": "c"})
    assert list(answers.inputs) == ["input_ids", "attention_mask"]
    assert answers.element_types == {"start_logits": "float32", "end_logits": "float32"}


def test_notes_name_what_is_not_as_the_paper_says() -> None:
    notes = notes_of("big_bird")
    assert f"= {FULL} tokens attention is full" in notes
    assert "There are no random blocks" in notes
    assert "its keys count 3 times" in notes
    assert "The last 4 places" in notes
    assert notes_of("big_bird", attention_type="original_full") == ""
    answers = notes_of("big_bird", "question-answering")
    assert f"up to the first sep_token_id {SEPARATOR}, are lowered by 1e6" in answers


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
        spec_of("big_bird", task, **fields)
    assert "\n" not in str(failure.value)
