"""Nyströmformer checkpoints: config.json → spec → module, against transformers with the same weights."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import largest_error, oracle_from_config, randomize, run_ours, with_weights

from effexport.models.checkpoints.bert import ACTIVATIONS
from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.nystromformer import IGNORED, Nystromformer, weight_names
from effexport.models.checkpoints.nystromformer_spec import NystromformerSpec
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

# Largest error over RMS. Both sides are fp32 and do the same operations, but ours masks with `where` instead of an
# addition, and crops before the head, so that products are cut into other blocks: 6e-8 relative for each, which the
# pseudo-inverse and the layers multiply. Measured up to 6.4e-6 over 150 random configurations; a machine with other
# vector widths gets three times that. The smallest planted fault, another form of gelu, makes 7e-4.
LIMIT = 2e-5

SEGMENT = 16
TINY: dict[str, Any] = {
    "model_type": "nystromformer",
    "vocab_size": 41,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "num_landmarks": 4,
    "segment_means_seq_len": SEGMENT,
    "conv_kernel_size": 5,
}
SOFTMAX = {"num_landmarks": 4, "segment_means_seq_len": 4}
BRANCHES: dict[str, dict[str, Any]] = {"landmarks": {}, "softmax": SOFTMAX}
TASKS = list(NystromformerSpec.TASKS)


def config_of(task: str = "base", **fields: Any) -> dict[str, Any]:
    """A config.json; fields given as "absent" are left out."""
    config = {**TINY, "architectures": [NystromformerSpec.TASKS[task]], **fields}
    return {name: value for name, value in config.items() if value != "absent"}


def spec_of(task: str = "base", options: Mapping[str, Any] | None = None, **fields: Any) -> NystromformerSpec:
    return NystromformerSpec.from_config(config_of(task, **fields), options or {})[0]


def notes_of(options: Mapping[str, Any] | None = None, **fields: Any) -> str:
    return "\n".join(NystromformerSpec.from_config(config_of(**fields), options or {})[1])


def module_from_weights(spec: NystromformerSpec, weights: Mapping[str, Tensor]) -> Nystromformer:
    module: Nystromformer = with_weights(Nystromformer(spec), weight_names(spec), IGNORED, weights)
    return module


def inputs_of(spec: NystromformerSpec, batch: int, seq_len: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Tokens, a mask with padding of random lengths at the end, and token types."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, 3, seq_len) if spec.task == "multiple-choice" else (batch, seq_len)
    lengths = torch.randint(1, seq_len + 1, shape[:-1], generator=generator)
    lengths.view(-1)[0] = seq_len
    mask = (torch.arange(seq_len) < lengths.unsqueeze(-1)).to(torch.int64)
    ids = torch.randint(0, spec.vocab_size, shape, generator=generator)
    types = torch.randint(0, spec.type_vocab_size, shape, generator=generator)
    return torch.where(mask == 1, ids, spec.pad_token_id), mask, types


def run_oracle(oracle: nn.Module, spec: NystromformerSpec, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """transformers on the input padded to the length of the landmarks, outputs cropped."""
    seq_len = inputs[0].shape[-1]
    extra = 0 if spec.is_plain_softmax else spec.segment_means_seq_len - seq_len
    fills = (spec.pad_token_id, 0, 0)
    padded = [nn.functional.pad(x, (0, extra), value=fill) for x, fill in zip(inputs, fills, strict=True)]
    result = oracle(**dict(zip(spec.inputs, padded, strict=True)))
    return [result[name][:, :seq_len] if "seq" in dims else result[name] for name, dims in spec.outputs.items()]


@torch.no_grad()
def error_against_transformers(config: dict[str, Any], sizes: list[tuple[int, int]], seed: int = 0) -> float:
    """The largest error over batches of the given (batch, seq_len)."""
    oracle = oracle_from_config(config, seed)
    spec, _ = NystromformerSpec.from_config(config, {})
    module = module_from_weights(spec, oracle.state_dict())
    worst = 0.0
    for batch, seq_len in sizes:
        inputs = inputs_of(spec, batch, seq_len, seed)
        actual = run_ours(module, inputs)
        lengths = {"batch": batch, "choices": 3, "seq": seq_len}
        declared = [tuple(lengths.get(str(dim), dim) for dim in dims) for dims in spec.outputs.values()]
        assert [tuple(x.shape) for x in actual] == declared
        worst = max(worst, largest_error(actual, run_oracle(oracle, spec, inputs)))
    return worst


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_equals_transformers(task: str, branch: str) -> None:
    config = config_of(task, id2label={"0": "a", "1": "b", "2": "c"}, **BRANCHES[branch])
    sizes = [(1, 1), (1, SEGMENT), (4, 7), (4, SEGMENT - 1), (4, SEGMENT)]
    assert error_against_transformers(config, sizes) <= LIMIT


def random_config(draw: random.Random) -> dict[str, Any]:
    heads, landmarks = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4, 8])
    segment = landmarks * draw.choice([1, 2, 3, 5])
    fields: dict[str, Any] = {
        "vocab_size": draw.randint(10, 60),
        "hidden_size": heads * draw.choice([2, 4, 8, 10]),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 40),
        "hidden_act": draw.choice(list(HIDDEN_ACTS)),
        "max_position_embeddings": segment + draw.randint(0, 5),
        "type_vocab_size": draw.randint(1, 3),
        "num_landmarks": landmarks,
        "segment_means_seq_len": segment,
        "conv_kernel_size": draw.choice([None, 1, 3, 9, 33]),
        "layer_norm_eps": draw.choice([1e-5, 1e-12, 1e-3]),
        "tie_word_embeddings": draw.choice([True, False]),
        "pad_token_id": draw.randint(0, 9),
        "id2label": {str(i): f"L{i}" for i in range(draw.randint(1, 4))},
        "chunk_size_feed_forward": draw.choice([0, 1]),
    }
    return config_of(draw.choice(TASKS), **fields)


@pytest.mark.parametrize("seed", range(30))
def test_random_configurations_equal_transformers(seed: int) -> None:
    draw = random.Random(seed)
    config = random_config(draw)
    longest = NystromformerSpec.from_config(config, {})[0].max_seq_len
    sizes = [(1, longest), (4, longest), (draw.randint(2, 3), draw.randint(1, longest))]
    assert error_against_transformers(config, sizes, seed) <= LIMIT


@pytest.mark.parametrize("hidden_act", HIDDEN_ACTS)
def test_every_activation_equals_transformers(hidden_act: str) -> None:
    config = config_of("sequence-classification", hidden_act=hidden_act, num_hidden_layers=1)
    assert error_against_transformers(config, [(2, 9)]) <= LIMIT
    assert set(ACTIVATIONS) == set(HIDDEN_ACTS.values())


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    written = json.loads(transformers.NystromformerConfig(architectures=["NystromformerModel"]).to_json_string())
    spec, _ = NystromformerSpec.from_config({"architectures": ["NystromformerModel"]}, {})
    assert spec == NystromformerSpec(seq_len=510)
    assert NystromformerSpec.from_config(written, {})[0] == spec
    everything = transformers.NystromformerConfig(architectures=["NystromformerModel"]).to_dict()
    assert NystromformerSpec.from_config(everything, {})[0] == spec


@torch.no_grad()
def test_per_head_start_values_equal_the_exact_option_of_transformers_and_separate_samples() -> None:
    config = config_of()
    oracle = oracle_from_config(config)
    for layer in oracle.encoder.layer:
        layer.attention.self.init_option = "exact"  # which its configuration cannot select
    spec = NystromformerSpec.from_config(config, {"pinv_init": "per_head"})[0]
    module = module_from_weights(spec, oracle.state_dict())
    inputs = inputs_of(spec, 4, 11)
    together = run_ours(module, inputs)
    assert largest_error(together, run_oracle(oracle, spec, inputs)) <= LIMIT
    alone = [x[1:2] for x in inputs]
    assert largest_error([together[0][1:2]], run_ours(module, tuple(alone))) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("saved_task", ["base", "masked-lm", "sequence-classification"])
def test_the_base_loads_from_base_and_head_checkpoints(saved_task: str) -> None:
    oracle = oracle_from_config(config_of(saved_task))
    weights = dict(oracle.state_dict())
    prefix = "" if saved_task == "base" else "nystromformer."
    weights[f"{prefix}embeddings.position_ids"] = torch.arange(20)[None]  # old versions saved these two
    weights[f"{prefix}embeddings.token_type_ids"] = torch.zeros(1, 20, dtype=torch.int64)
    spec = NystromformerSpec.from_config(config_of(saved_task), {"task": "base"})[0]
    module = module_from_weights(spec, weights)
    inputs = inputs_of(spec, 2, SEGMENT)
    base = oracle if saved_task == "base" else oracle.nystromformer
    assert largest_error(run_ours(module, inputs), run_oracle(base, spec, inputs)) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_decoder_is_the_table_of_words_whatever_the_file_says(tied: bool) -> None:
    import transformers

    config = config_of("masked-lm", tie_word_embeddings=tied)
    weights = {name: value.clone() for name, value in oracle_from_config(config).state_dict().items()}
    weights["cls.predictions.decoder.weight"] = torch.randn(41, 16, generator=torch.Generator().manual_seed(5))
    oracle = transformers.NystromformerForMaskedLM.from_pretrained(
        None, config=transformers.NystromformerConfig(**config), state_dict=weights
    ).eval()
    spec = NystromformerSpec.from_config(config, {})[0]
    module = module_from_weights(spec, weights)
    assert (module.head.decoder.weight is module.embeddings.word.weight) == tied
    inputs = inputs_of(spec, 2, 9)
    assert largest_error(run_ours(module, inputs), run_oracle(oracle, spec, inputs)) <= LIMIT
    if tied:  # what safetensors files lack, because it would be there twice
        del weights["cls.predictions.decoder.weight"]
        del weights["cls.predictions.decoder.bias"]
        again = module_from_weights(spec, weights)
        assert torch.equal(again(*inputs), module(*inputs))


@pytest.mark.parametrize(("fields", "longest"), [({}, SEGMENT), (SOFTMAX, 20)])
def test_a_longer_sequence_is_refused(fields: dict[str, Any], longest: int) -> None:
    spec = spec_of(**fields)
    assert spec.max_seq_len == longest
    with pytest.raises(SpecError, match=f"the sequence has {longest + 1} tokens; expected at most {longest}"):
        Nystromformer(spec)(*inputs_of(spec, 2, longest + 1))


# tracing at the very length, and one token below, where a size would be 0 or 1
@pytest.mark.parametrize(
    ("task", "branch", "traced"),
    [
        ("base", "landmarks", SEGMENT),
        ("question-answering", "landmarks", SEGMENT - 1),
        ("multiple-choice", "landmarks", 6),
        ("base", "softmax", 20),
    ],
)
@torch.no_grad()
def test_batch_and_length_stay_dynamic_in_an_exported_program(task: str, branch: str, traced: int) -> None:
    spec = spec_of(task, **BRANCHES[branch])
    module = Nystromformer(spec).eval()
    randomize(module, 0)
    dynamic = tuple(dict.fromkeys(range(len(dims)), torch.export.Dim.DYNAMIC) for dims in spec.inputs.values())
    program = torch.export.export(module, inputs_of(spec, 2, traced), dynamic_shapes=dynamic).module()
    for batch, seq_len in ((2, 2), (3, 7), (4, spec.max_seq_len - 1), (5, spec.max_seq_len)):
        inputs = inputs_of(spec, batch, seq_len)
        assert largest_error(run_ours(program, inputs), run_ours(module, inputs)) <= LIMIT
    # whichever guard or operator meets the length first: AssertionError, RuntimeError or ValueError
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        program(*inputs_of(spec, 2, spec.max_seq_len + 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("branch", BRANCHES)
@torch.no_grad()
def test_half_precision_modules_run(dtype: torch.dtype, branch: str) -> None:
    spec = spec_of("masked-lm", **BRANCHES[branch])
    module = Nystromformer(spec).eval()
    randomize(module, 0)
    inputs = inputs_of(spec, 2, 9)
    expected = module(*inputs)
    actual = module.to(dtype)(*inputs)
    assert actual.dtype == dtype
    error = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # rounding of weights by 2^-11 or 2^-8, multiplied by two layers and the head
    assert float(error) <= (2e-2 if dtype == torch.float16 else 1e-1)


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("multiple-choice", type_vocab_size=3)
    assert spec.inputs == dict.fromkeys(["input_ids", "attention_mask", "token_type_ids"], ("batch", "choices", "seq"))
    assert spec.outputs == {"logits": ("batch", "choices")}
    assert spec.input_limits == {"input_ids": 41, "token_type_ids": 3}
    assert spec.layers == 2
    assert spec.custom_ops(fused=False) == {"IterativePinv": 2}
    assert (spec.seq_len, spec.attention.seq_len, spec.max_seq_len) == (SEGMENT, SEGMENT, SEGMENT)
    assert spec_of("base", {"seq_len": 9}).attention.seq_len == SEGMENT
    plain = spec_of("base", {"seq_len": 9}, **SOFTMAX)
    assert plain.custom_ops(fused=False) == {}
    assert plain.attention.is_plain_softmax
    assert (plain.seq_len, plain.attention.seq_len, plain.max_seq_len) == (9, 9, 20)
    assert spec_of(**SOFTMAX).seq_len == 20
    assert spec_of("question-answering").outputs == {"start_logits": ("batch", "seq"), "end_logits": ("batch", "seq")}


def test_options_come_before_the_configuration() -> None:
    options = {"task": "token-classification", "num_labels": 7, "seq_len": 5, "pinv_init": "per_head"}
    spec = spec_of("masked-lm", options)
    assert {name: getattr(spec, name) for name in options} == options
    assert spec.attention.pinv_init == "per_head"
    # a task needs no class in config.json
    assert spec_of("base", {"task": "base"}, architectures="absent").task == "base"


def test_classes_are_counted_as_transformers_does() -> None:
    task = "sequence-classification"
    assert spec_of(task).num_labels == 2
    assert spec_of(task, num_labels=5).num_labels == 5
    assert spec_of(task, id2label={"0": "a", "1": "b", "2": "c"}).num_labels == 3


def test_only_a_model_that_pads_by_itself_needs_a_padding_token() -> None:
    assert spec_of(pad_token_id=None, **SOFTMAX).pad_token_id == 0
    with pytest.raises(SpecError, match="pad_token_id is None; expected int"):
        spec_of(pad_token_id=None)


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
        spec_of(**fields)


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
        spec_of("base", options)


def test_notes_say_that_equal_numbers_mean_plain_softmax() -> None:
    notes = notes_of(**SOFTMAX)
    assert "plain softmax attention, not Nyström" in notes
    assert "sequences of 1 to 20 tokens work" in notes
    assert "convolution over the values is not masked and carries padding up to 2 tokens" in notes
    assert "pseudo-inverse" not in notes
    assert "convolution" not in notes_of(conv_kernel_size=None, **SOFTMAX)


def test_notes_name_the_defects_of_the_landmarks() -> None:
    notes = notes_of()
    assert "softmax attention" not in notes
    assert "padded to 16 inside the graph" in notes
    assert "longer ones are refused, where transformers may mix the samples" in notes
    assert "depends on the rest of the batch; use pinv_init per_head" in notes
    assert "landmarks average over padding too, which reaches every token, and through the convolution" in notes
    assert "pad with pad_token_id 1" in notes
    assert "cannot run this model in fp16 or bf16" in notes
    assert "transformers 4.57.1" in notes
    assert "through the convolution" not in notes_of(conv_kernel_size=None)


def test_notes_say_that_per_head_start_values_differ_from_transformers() -> None:
    notes = notes_of({"pinv_init": "per_head"})
    assert "samples are independent" in notes
    assert "its results differ" in notes
    assert "use pinv_init per_head" not in notes
