"""ModernBERT checkpoints: config.json → spec → module, against transformers with the same weights."""

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
from effexport.models.checkpoints.modernbert_spec import ModernBertSpec
from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

# Largest error over RMS: float32 sums in another order, which attention amplifies.
LIMIT = 2e-5
# The same in float64, for configurations that amplify more, such as heads of two channels. Seen were up to 1e-13.
EXACT = 1e-10
TINY: dict[str, Any] = {
    "model_type": "modernbert",
    "vocab_size": 41,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 1100,
    "local_attention": 16,
    "pad_token_id": 3,
}
# one token, less than a window, as much, no multiples of it, and long
LENGTHS = (1, 5, 8, 17, 100, 259, 1003)
TASKS = list(ModernBertSpec.TASKS)


def config_of(task: str = "base", **fields: Any) -> dict[str, Any]:
    """A config.json; fields given as "absent" are left out."""
    config = {**TINY, "architectures": [ModernBertSpec.TASKS[task]], **fields}
    return {name: value for name, value in config.items() if value != "absent"}


def spec_of(task: str = "base", **fields: Any) -> ModernBertSpec:
    spec = spec_from_config(config_of(task, **fields))
    assert isinstance(spec, ModernBertSpec)
    return spec


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_any_length_equals_transformers(implementation: str) -> None:
    assert error_against_original(config_of(), LENGTHS, attn_implementation=implementation) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_equals_transformers(task: str, pooling: str) -> None:
    labels = {} if task == "question-answering" else {"id2label": {"0": "a", "1": "b", "2": "c"}}
    assert error_against_original(config_of(task, classifier_pooling=pooling, **labels), (1, 30)) <= LIMIT


def random_config(draw: random.Random) -> dict[str, Any]:
    heads, task = draw.choice([1, 2, 3]), draw.choice(TASKS)
    fields: dict[str, Any] = {
        "vocab_size": draw.randint(10, 60),
        "hidden_size": heads * draw.choice([2, 4, 10, 16]),
        "num_hidden_layers": draw.randint(1, 5),
        "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 40),
        "hidden_activation": draw.choice(list(HIDDEN_ACTS)),
        "classifier_activation": draw.choice(list(HIDDEN_ACTS)),
        "norm_eps": draw.choice([1e-5, 1e-12, 1e-3]),
        "local_attention": draw.choice([0, 1, 2, 7, 30, 128]),
        "global_attn_every_n_layers": draw.choice([1, 2, 3, 9]),
        "global_rope_theta": draw.choice([160000.0, 10000, 500.0]),
        "local_rope_theta": draw.choice([10000.0, 100.0, None]),
        "classifier_pooling": draw.choice(["cls", "mean"]),
        "tie_word_embeddings": draw.choice([True, False]),
        "pad_token_id": draw.randint(0, 9),
        **{
            name: draw.choice([True, False])
            for name in ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
        },
    }
    if task != "question-answering":
        fields["id2label"] = {str(i): f"L{i}" for i in range(draw.randint(1, 4))}
    return config_of(task, **fields)


@torch.no_grad()
@pytest.mark.parametrize("seed", slow_after(5, range(20)))
def test_random_configurations_equal_transformers(seed: int) -> None:
    draw = random.Random(seed)
    lengths = (draw.randint(1, 20), draw.randint(20, 90))
    assert error_against_original(random_config(draw), lengths, seed, torch.float64) <= EXACT


@torch.no_grad()
def test_left_padding_equals_transformers() -> None:
    """Positions count from the first column, as in transformers; the first choice of a padded row is not column 0."""
    for task in ("base", "multiple-choice"):
        config = config_of(task)
        original, spec = oracle_from_config(config), spec_from_config(config)
        inputs = token_inputs(spec, 3, 40) | {"attention_mask": token_inputs(spec, 3, 40)["attention_mask"].flip(-1)}
        module = module_from_weights(spec, original.state_dict())
        assert kept_error(spec, inputs, module(*inputs.values()), original(**inputs)) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_a_sample_does_not_depend_on_its_padding(fused: bool) -> None:
    config = config_of()
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config).state_dict())
    inputs = token_inputs(spec, 1, 50, padded=False)
    padded = {name: torch.nn.functional.pad(value, (0, 30)) for name, value in inputs.items()}
    with fused_operators(module, fused):
        together = module(*(torch.cat([x, x.flip(1)]) for x in padded.values()))
        assert kept_error(spec, inputs, together[:1, :50], {"last_hidden_state": module(*inputs.values())}) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("saved_task", ["base", "masked-lm", "sequence-classification"])
def test_the_base_loads_from_base_and_head_checkpoints(saved_task: str) -> None:
    original = oracle_from_config(config_of(saved_task))
    spec = spec_from_config(config_of(saved_task), {"task": "base"})
    module, inputs = module_from_weights(spec, original.state_dict()), token_inputs(spec, 2, 20)
    base = original if saved_task == "base" else original.model
    assert kept_error(spec, inputs, module(*inputs.values()), base(**inputs)) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_decoder_is_the_table_of_words_whatever_the_file_says(tied: bool) -> None:
    import transformers

    config = config_of("masked-lm", tie_word_embeddings=tied)
    weights = {name: value.clone() for name, value in oracle_from_config(config).state_dict().items()}
    weights["decoder.weight"] = torch.randn(41, 24, generator=torch.Generator().manual_seed(5))
    original = transformers.ModernBertForMaskedLM.from_pretrained(
        None, config=transformers.ModernBertConfig(**config), state_dict=dict(weights)
    ).eval()
    spec = spec_from_config(config)
    module = module_from_weights(spec, weights)
    assert (module.head.out.weight is module.token_embedding.weight) == tied
    inputs = token_inputs(spec, 2, 9)
    assert kept_error(spec, inputs, module(*inputs.values()), original(**inputs)) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_batch_and_length_stay_dynamic_in_an_exported_program(fused: bool) -> None:
    spec = spec_of("multiple-choice", classifier_pooling="mean")
    module = module_from_weights(spec, oracle_from_config(config_of("multiple-choice")).state_dict())
    dynamic = tuple(dict.fromkeys(range(len(dims)), torch.export.Dim.DYNAMIC) for dims in spec.inputs.values())
    with fused_operators(module, fused):
        example = tuple(token_inputs(spec, 2, 30).values())
        program = torch.export.export(module, example, dynamic_shapes=dynamic).module()
    for batch, seq_len in ((2, 2), (3, 7), (4, 300)):
        inputs = token_inputs(spec, batch, seq_len)
        expected = {"logits": module(*inputs.values())}
        assert kept_error(spec, inputs, program(*inputs.values()), expected) <= LIMIT


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules_run(dtype: torch.dtype) -> None:
    config = config_of("sequence-classification", classifier_pooling="mean")
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config).state_dict())
    inputs = token_inputs(spec, 2, 60)
    expected = module(*inputs.values())
    actual = module.to(dtype)(*inputs.values())
    assert actual.dtype == dtype
    error = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # rounding of weights by 2^-11 or 2^-8, multiplied by four layers and the head
    assert float(error) <= (2e-2 if dtype == torch.float16 else 1e-1)


def test_gradients_reach_all_weights_also_with_padding() -> None:
    """A hidden token far from all others sees no key, which must not make NaN of all gradients."""
    config = config_of("token-classification")
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config).state_dict())
    inputs = token_inputs(spec, 2, 60)
    inputs["attention_mask"][1, 10:] = 0
    module(*inputs.values())[inputs["attention_mask"] == 1].sum().backward()
    assert all(torch.isfinite(weight.grad).all() and weight.grad.abs().max() > 0 for weight in module.parameters())


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    written = json.loads(transformers.ModernBertConfig(architectures=["ModernBertModel"]).to_json_string())
    spec = spec_from_config({"model_type": "modernbert", "architectures": ["ModernBertModel"]})
    assert spec == ModernBertSpec(seq_len=1024)
    assert spec_from_config(written) == spec
    assert spec_from_config(transformers.ModernBertConfig(architectures=["ModernBertModel"]).to_dict()) == spec


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("multiple-choice", num_hidden_layers=7)
    assert spec.inputs == dict.fromkeys(["input_ids", "attention_mask"], ("batch", "choices", "seq"))
    assert spec.outputs == {"logits": ("batch", "choices")}
    assert spec.custom_ops(fused=True) == {"MaskedAttention": 3, "BandedAttention": 4}
    assert spec.custom_ops(fused=False) == {}
    assert (spec.seq_len, spec.max_seq_len, spec.why_samples_mix) == (1024, 1100, "")


def test_a_longer_sequence_is_refused() -> None:
    spec = spec_of(max_position_embeddings=20)
    module = module_from_weights(spec, oracle_from_config(config_of()).state_dict())
    with pytest.raises(SpecError, match="the sequence has 21 tokens; expected at most 20"):
        module(*token_inputs(spec, 1, 21).values())
    with pytest.raises(SpecError, match="seq_len is 21; this checkpoint has positions for 1 to 20"):
        spec_from_config(config_of(max_position_embeddings=20), {"seq_len": 21})


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        ("base", {"hidden_activation": "gelu_nwe"}, "hidden_activation is 'gelu_nwe'; did you mean 'gelu_new'"),
        ("base", {"classifier_activation": "selu"}, "classifier_activation is 'selu'.*Supported: gelu, "),
        ("base", {"num_attention_heads": 5}, "hidden_size 24 cannot be split into 5 heads of an even size"),
        ("base", {"hidden_size": 6, "num_attention_heads": 2}, "hidden_size 6 cannot be split into 2 heads of an even"),
        ("base", {"local_attention": -1}, "local_attention is -1; expected 0 or more"),
        ("base", {"global_rope_theta": 0}, "global_rope_theta is 0; expected a number > 0"),
        ("base", {"local_rope_theta": "x"}, "local_rope_theta is 'x'; expected a finite number"),
        ("base", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0; expected at least 1"),
        ("base", {"norm_eps": 0}, "norm_eps is 0; expected a number > 0"),
        ("base", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling is .*expected none"),
        ("base", {"classifier_pooling": "max"}, "classifier_pooling is 'max'; expected one of cls, mean"),
        ("base", {"pad_token_id": 41}, "pad_token_id is 41; expected a token, 0 to 40"),
        ("question-answering", {"num_labels": 3}, "num_labels is 3; the task question-answering has 2"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_reason(
    task: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as failure:
        spec_of(task, **fields)
    assert "\n" not in str(failure.value)
