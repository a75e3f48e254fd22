"""Nyströmformer checkpoints, beyond test_published.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from originals import LIMIT, PUBLISHED, SOFTMAX, both_models, config_of, error_of, notes_of, spec_of, token_inputs

from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

SEGMENT = 16


@torch.no_grad()
def test_per_head_start_values_equal_the_exact_option_of_transformers_and_separate_samples() -> None:
    original, module = both_models(config_of("nystromformer"), {"pinv_init": "per_head"})
    for layer in original.encoder.layer:
        layer.attention.self.init_option = "exact"  # which its configuration cannot select
    inputs = token_inputs(module.spec, 4, 11)
    together, expected = module(*inputs.values()), PUBLISHED["nystromformer"].answers(original, module, inputs)
    assert error_of(module.spec, inputs, together, expected) <= LIMIT
    alone = {name: x[1:2] for name, x in inputs.items()}
    assert error_of(module.spec, alone, together[1:2], {"last_hidden_state": module(*alone.values())}) <= LIMIT


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("nystromformer", "multiple-choice", type_vocab_size=3)
    assert spec.inputs == dict.fromkeys(["input_ids", "attention_mask", "token_type_ids"], ("batch", "choices", "seq"))
    assert spec.outputs == {"logits": ("batch", "choices")}
    assert spec.input_limits == {"input_ids": 41, "token_type_ids": 3}
    assert spec.layers == 2
    assert spec.custom_ops(fused=False) == {"IterativePinv": 2}
    assert (spec.seq_len, spec.attention.seq_len, spec.max_seq_len) == (SEGMENT, SEGMENT, SEGMENT)
    assert spec_of("nystromformer", "base", {"seq_len": 9}).attention.seq_len == SEGMENT
    plain = spec_of("nystromformer", "base", {"seq_len": 9}, **SOFTMAX)
    assert plain.custom_ops(fused=False) == {}
    assert plain.attention.is_plain_softmax
    assert (plain.seq_len, plain.attention.seq_len, plain.max_seq_len) == (9, 9, 20)
    assert spec_of("nystromformer", **SOFTMAX).seq_len == 20
    assert spec_of("nystromformer", "question-answering").outputs == {
        "start_logits": ("batch", "seq"),
        "end_logits": ("batch", "seq"),
    }


def test_options_come_before_the_configuration() -> None:
    options = {"task": "token-classification", "num_labels": 7, "seq_len": 5, "pinv_init": "per_head"}
    spec = spec_of("nystromformer", "masked-lm", options)
    assert {name: getattr(spec, name) for name in options} == options
    assert spec.attention.pinv_init == "per_head"
    # a task needs no class in config.json
    assert spec_of("nystromformer", "base", {"task": "base"}, architectures="absent").task == "base"


def test_classes_are_counted_as_transformers_does() -> None:
    task = "sequence-classification"
    assert spec_of("nystromformer", task).num_labels == 2
    assert spec_of("nystromformer", task, num_labels=5).num_labels == 5
    assert spec_of("nystromformer", task, id2label={"0": "a", "1": "b", "2": "c"}).num_labels == 3


def test_only_a_model_that_pads_by_itself_needs_a_padding_token() -> None:
    assert spec_of("nystromformer", pad_token_id=None, **SOFTMAX).pad_token_id == 0
    with pytest.raises(SpecError, match="pad_token_id is None; expected int"):
        spec_of("nystromformer", pad_token_id=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu_nwe"}, "hidden_act is 'gelu_nwe'; did you mean 'gelu_new'.*Supported: gelu, "),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'.*Supported: gelu, "),
        ({"hidden_act": 3}, "hidden_act is 3; expected str"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'.*'absolute'"),
        ({"inv_coeff_init_option": True}, "inv_coeff_init_option is true.*expected false.*per_head"),
        ({"is_decoder": True}, "is_decoder is true.*no causal form"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is .*expected none"),
        (
            {"num_landmarks": 512, "segment_means_seq_len": 64},
            "num_landmarks is 512, more than segment_means_seq_len 64.*swapped.*num_landmarks 64 and segment_means_seq",
        ),
        ({"num_landmarks": 5}, "segment_means_seq_len 16 is not a multiple of num_landmarks 5.*15 or 20"),
        (
            {"max_position_embeddings": 15},
            "max_position_embeddings is 15.*exactly segment_means_seq_len 16.*at most 15",
        ),
        (
            {"max_position_embeddings": 1, "segment_means_seq_len": 1, "num_landmarks": 1},
            "config.json has positions for 1 token; expected at least 2",
        ),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4.*must be odd.*3 or 5"),
        ({"conv_kernel_size": "5"}, "conv_kernel_size is '5'; expected an integer"),
        ({"num_attention_heads": 3}, "hidden_size 16 cannot be split into 3 heads .* num_attention_heads in config"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0; expected an odd number, or null for no convolution"),
        ({"architectures": ["BertModel"]}, r"architectures is \['BertModel'\].*NystromformerModel.*choose a task"),
        ({"architectures": []}, r"architectures is \[\].*choose a task"),
        ({"architectures": "absent"}, "architectures is None.*choose a task"),
        ({"architectures": [["x"]]}, "architectures is .*choose a task"),
        ({"hidden_size": "16"}, "hidden_size is '16'; expected int"),
        ({"hidden_size": True}, "hidden_size is True; expected int"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0; expected a number > 0"),
        ({"layer_norm_eps": "1e-5"}, "layer_norm_eps is '1e-5'; expected float"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected bool"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected at least 1"),
        ({"num_landmarks": 0}, "num_landmarks is 0; expected at least 1"),
        ({"num_attention_heads": 0}, "^num_attention_heads is 0; expected at least 1"),
        ({"hidden_size": 2**31}, "^hidden_size is 2147483648; expected at most 2147483647"),
        ({"pad_token_id": 41}, "pad_token_id is 41; expected a token, 0 to 40"),
        ({"id2label": ["a"]}, r"id2label is \['a'\]; expected an object"),
        ({"num_labels": 0}, "num_labels is 0; expected at least 1"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of("nystromformer", **fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 9}, "no option 'sequence_length'.*Its options: task, seq_len, num_labels, pinv_init"),
        ({"seq_len": 17}, "seq_len is 17; this checkpoint has positions for 1 to 16"),
        ({"seq_len": "9"}, "seq_len is '9'; expected an integer"),
        ({"task": "causal-lm"}, "task is 'causal-lm'; nystromformer has: base, masked-lm"),
        ({"task": ["base"]}, r"task is \['base'\]; expected a word"),
        ({"pinv_init": "local"}, "pinv_init is 'local'; expected one of global, per_head"),
        ({"num_labels": 0}, "num_labels is 0; expected at least 1"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of("nystromformer", "base", options)


def test_notes_say_that_equal_numbers_mean_plain_softmax() -> None:
    notes = notes_of("nystromformer", **SOFTMAX)
    assert "plain softmax attention, not Nyström" in notes
    assert "sequences of 1 to 20 tokens work" in notes
    assert "convolution over the values is not masked and carries padding up to 2 tokens" in notes
    assert "pseudo-inverse" not in notes
    assert "convolution" not in notes_of("nystromformer", conv_kernel_size=None, **SOFTMAX)


def test_notes_name_the_defects_of_the_landmarks() -> None:
    notes = notes_of("nystromformer")
    assert "softmax attention" not in notes
    assert "padded to 16 inside the graph" in notes
    assert "longer ones are refused, where transformers may mix the samples" in notes
    assert "depends on the rest of the batch; use pinv_init per_head" in notes
    assert "landmarks average over padding too, which reaches every token, and through the convolution" in notes
    assert "pad with pad_token_id 1" in notes
    assert "cannot run this model in fp16 or bf16" in notes
    assert "transformers 4.57.1" in notes
    assert "through the convolution" not in notes_of("nystromformer", conv_kernel_size=None)


def test_notes_say_that_per_head_start_values_differ_from_transformers() -> None:
    notes = notes_of("nystromformer", "", {"pinv_init": "per_head"})
    assert "samples are independent" in notes
    assert "its results differ" in notes
    assert "use pinv_init per_head" not in notes
