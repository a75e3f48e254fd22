"""Every family of published checkpoints: one table, families × heads × forms × lengths × random configurations, against
transformers with the same weights (tests/support/originals.py). What it cannot say is in test_<family>.py."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from originals import (
    GEOMETRIES,
    HEADS,
    LABELS,
    LIMIT,
    PUBLISHED,
    SOFTMAX,
    both_models,
    config_of,
    error_against_original,
    error_of,
    lengths_of,
    module_from_weights,
    random_config,
    spec_from_config,
    spec_of,
    token_inputs,
)
from slow_cases import slow_after, soak
from transformers_models import oracle_from_config

from effexport.models.checkpoints.bert import ACTIVATIONS
from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.spec import FAMILIES
from effexport.models.contract import load
from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These layers are tiny: on a busy machine, threads that wait for each other take twenty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


families = pytest.mark.parametrize("family", PUBLISHED)


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """An encoder of LED is a choice of the user."""
    return {"task": "encoder"} if config["architectures"] == ["LEDModel"] else {}


@pytest.mark.parametrize(("family", "task"), HEADS)
def test_every_head_equals_that_of_transformers(family: str, task: str) -> None:
    row, labels = PUBLISHED[family], {} if task == "question-answering" else LABELS
    config = config_of(family, task, **labels)
    options, first_kept = options_of(config), row.first_kept and task == "sequence-classification"
    error = error_against_original(config, (row.lengths[0], *row.lengths[2:5:2]), 0, row.dtype, options, first_kept)
    assert error <= row.exact


@pytest.mark.parametrize(
    ("family", "form"), [(family, form) for family, row in PUBLISHED.items() for form in row.forms]
)
def test_every_form_equals_transformers_in_float32_at_any_length(family: str, form: str) -> None:
    row = PUBLISHED[family]
    config = config_of(family, row.task, **row.forms[form])
    assert error_against_original(config, row.lengths, dtype=torch.float32, options=options_of(config)) <= LIMIT


NO_LSH = dict.fromkeys(("lsh_attn_chunk_length", "lsh_num_chunks_before", "lsh_num_chunks_after", "num_buckets"))
ONE_LAYER = {"num_hidden_layers": 1}
THREE = {"attn_layers": ["local", "lsh", "local"]}


@pytest.mark.parametrize(
    ("family", "fields", "lengths"),
    [
        *(("nystromformer", ONE_LAYER | {"hidden_act": act}, (9,)) for act in HIDDEN_ACTS),
        # transformers has a branch of its own for these lengths
        (
            "big_bird",
            ONE_LAYER | {"max_position_embeddings": 4096, "block_size": 64, "num_random_blocks": 3},
            (1024, 3072),
        ),
        *(("reformer", fields, (1100, 256, 50)) for fields in GEOMETRIES.values()),
        # what looks inconsistent
        ("reformer", {"attn_layers": ["local", "local"], **NO_LSH}, (40, 61, 7)),
        ("reformer", {"attn_layers": ["lsh"], "local_attn_chunk_length": None}, (40, 61, 7)),
        ("reformer", {"attn_layers": ["lsh"], "local_num_chunks_before": None}, (40, 61, 7)),
        # the number of layers wins over the list; chunks of kinds that are only in the list still count for padding
        ("reformer", THREE | ONE_LAYER | {"lsh_attn_chunk_length": 16}, (40, 61, 7)),
        ("reformer", THREE | {"num_hidden_layers": 2}, (40, 61, 7)),
        ("reformer", {"attn_layers": ["lsh"], "num_hidden_layers": 3}, (40, 61, 7)),
    ],
    ids=str,
)
def test_special_configurations_equal_transformers(
    family: str, fields: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    assert error_against_original(config_of(family, **fields), lengths, dtype=torch.float32) <= LIMIT
    assert set(ACTIVATIONS) == set(HIDDEN_ACTS.values())


@pytest.mark.parametrize(("seed", "family"), slow_after(72, itertools.product(range(24), PUBLISHED), soak_after=72))
def test_random_configurations_equal_transformers(seed: int, family: str) -> None:
    draw, row = random.Random(seed), PUBLISHED[family]
    config = random_config(family, draw)
    options = options_of(config)
    lengths = lengths_of(spec_from_config(config, options), draw)
    # what a head makes of a first token that is hidden is compared above
    error = error_against_original(config, lengths, seed, row.dtype, options, first_kept=True)
    assert error <= row.exact


@pytest.mark.parametrize(("family", "task"), [(family, task) for family, task in HEADS if PUBLISHED[family].base])
@torch.no_grad()
def test_the_model_without_a_head_loads_from_a_checkpoint_with_any(family: str, task: str) -> None:
    """Also one of an old version, which has more in it."""
    row, original = PUBLISHED[family], oracle_from_config(config_of(family, task))
    weights, prefix = dict(original.state_dict()), "" if task == "base" else f"{row.base}."
    weights |= {f"{prefix}{name}": torch.zeros(1, 20, dtype=torch.int64) for name in row.old}
    spec = spec_of(family, task, {"task": "base"})
    module, inputs = module_from_weights(spec, weights), token_inputs(spec, 2, 16)
    base = original if task == "base" else original.get_submodule(row.base)
    assert error_of(spec, inputs, module(*inputs.values()), row.answers(base, module, inputs)) <= LIMIT


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [family for family, row in PUBLISHED.items() if row.decoder])
@torch.no_grad()
def test_a_tied_decoder_is_the_table_of_words_whatever_the_file_says(family: str, tied: bool) -> None:
    row, config = PUBLISHED[family], config_of(family, "masked-lm", tie_word_embeddings=tied)
    model = oracle_from_config(config)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights[row.decoder] = torch.randn(weights[row.decoder].shape, generator=torch.Generator().manual_seed(5))
    original = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights)).eval()
    spec = spec_from_config(config)
    module, inputs = module_from_weights(spec, weights), token_inputs(spec, 2, 9)
    found, expected = module(*inputs.values()), row.answers(original, module, inputs)
    assert error_of(spec, inputs, found, expected) <= LIMIT
    parameters, names = list(module.parameters()), list(module.named_parameters(remove_duplicate=False))
    assert (len(parameters) < len(names)) == tied
    if tied:  # which safetensors files lack, because it would be there twice
        del weights[row.decoder]
        assert torch.equal(module_from_weights(spec, weights)(*inputs.values()), found)


LONG = {"max_position_embeddings": 802}
MEAN = {"classifier_pooling": "mean"}
EXPORTED: list[Any] = [
    ("longformer", "masked-lm", LONG, 256, True, (2, 7, 256, 512, 601)),
    ("big_bird", "multiple-choice", {}, 200, False, (2, 36, 37, 300)),
    ("modernbert", "multiple-choice", MEAN, 30, False, (2, 7, 300)),
    # at the very length, and one token below, where a size would be 0 or 1
    ("nystromformer", "base", {}, 16, False, (2, 7, 15, 16)),
    # within a chunk it is another program
    pytest.param("reformer", "lm-head", {}, 32, False, (9, 63, 256), marks=pytest.mark.slow),
    pytest.param("longformer", "base", LONG, 20, False, (2, 7, 256, 512, 601), marks=pytest.mark.slow),
    *map(
        soak,
        [
            ("longformer", "question-answering", LONG, 7, True, (2, 7, 256, 512, 601)),
            ("longformer", "multiple-choice", LONG, 6, False, (2, 7, 256, 512, 601)),
            ("big_bird", "multiple-choice", {}, 200, True, (2, 36, 37, 300)),
            ("modernbert", "multiple-choice", MEAN, 30, True, (2, 7, 300)),
            ("nystromformer", "question-answering", {}, 15, False, (2, 7, 15, 16)),
            ("nystromformer", "multiple-choice", {}, 6, False, (2, 7, 15, 16)),
            ("nystromformer", "base", SOFTMAX, 20, False, (2, 7, 19, 20)),
        ],
    ),
]


@pytest.mark.parametrize(("family", "task", "fields", "traced", "fused", "lengths"), EXPORTED)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@torch.no_grad()
def test_batch_and_length_stay_dynamic_in_an_exported_program(
    family: str, task: str, fields: dict[str, Any], traced: int, fused: bool, lengths: tuple[int, ...]
) -> None:
    _, module = both_models(config_of(family, task, **fields))
    spec = module.spec
    dynamic = tuple(dict.fromkeys(range(len(dims)), torch.export.Dim.DYNAMIC) for dims in spec.inputs.values())
    with fused_operators(module, fused):
        example = tuple(token_inputs(spec, 2, traced).values())
        program = torch.export.export(module, example, dynamic_shapes=dynamic).module()
    for seq_len in lengths:
        inputs = token_inputs(spec, 1 + seq_len % 4, seq_len)
        found, expected = (f(*inputs.values()) for f in (program, module))
        expected = dict(zip(spec.outputs, expected if isinstance(expected, tuple) else (expected,), strict=True))
        assert error_of(spec, inputs, found, expected) <= LIMIT
    if family == "nystromformer":
        # whichever guard or operator meets the length first: AssertionError, RuntimeError or ValueError
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            program(*token_inputs(spec, 2, spec.max_seq_len + 1).values())


def first_of(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "task", "fields"),
    [
        ("big_bird", "base", {}),
        ("longformer", "masked-lm", {}),
        ("modernbert", "sequence-classification", MEAN),
        ("nystromformer", "masked-lm", {}),
        ("nystromformer", "masked-lm", SOFTMAX),
    ],
)
@torch.no_grad()
def test_half_precision_modules_run(family: str, task: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    _, module = both_models(config_of(family, task, **fields))
    inputs = token_inputs(module.spec, 2, min(60, module.spec.max_seq_len))
    expected = first_of(module(*inputs.values()))
    actual = first_of(module.to(dtype)(*inputs.values()))
    assert actual.dtype == dtype
    error = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # rounding of weights by 2^-11 or 2^-8, multiplied by all layers and the head
    assert float(error) <= (2e-2 if dtype == torch.float16 else 1e-1)


@families
def test_gradients_reach_all_weights_also_with_padding(family: str) -> None:
    """A hidden token far from all others may see no key, which must not make NaN of all gradients."""
    _, module = both_models(config_of(family, PUBLISHED[family].trained))
    inputs = token_inputs(module.spec, 4, min(60, module.spec.max_seq_len))
    inputs["attention_mask"][1, 10:] = 0
    logits = module(*inputs.values())
    kept = logits[inputs["attention_mask"] == 1] if logits.shape[1] == inputs["input_ids"].shape[1] else logits
    kept.square().mean().backward()
    for name, weight in module.named_parameters():
        assert torch.isfinite(weight.grad).all(), name
        assert weight.grad.abs().max() > 0, name


DEFAULT_LENGTHS = {"nystromformer": 510, "longformer": 510, "modernbert": 1024}


@families
def test_defaults_are_those_of_transformers(family: str) -> None:
    spec_class = load(FAMILIES[family].spec)
    named = {"architectures": [next(iter(spec_class.TASKS.values()))]}
    kind = type(oracle_from_config(config_of(family)).config)
    spec, options = spec_from_config({"model_type": family, **named}, options_of(named)), options_of(named)
    assert spec == spec_class(seq_len=DEFAULT_LENGTHS.get(family, 4096)).resolved()
    written = kind(**named)
    # LED has one window for each layer once a model is made
    whole = written.to_dict() | ({"attention_window": [512] * 12} if family == "led" else {})
    assert spec_from_config(json.loads(written.to_json_string()) | {"model_type": family}, options) == spec
    assert spec_from_config(whole, options).layer_specs == spec.layer_specs


@pytest.mark.parametrize(("family", "fields"), [*((family, {}) for family in PUBLISHED), ("nystromformer", SOFTMAX)])
def test_a_longer_sequence_is_refused(family: str, fields: dict[str, Any]) -> None:
    config = config_of(family, PUBLISHED[family].task, **fields)
    _, module = both_models(config)
    most = module.spec.max_seq_len
    with pytest.raises(SpecError, match=f"the sequence has {most + 1} tokens; expected at most {most}"):
        module(*token_inputs(module.spec, 2, most + 1).values())
    with pytest.raises(SpecError, match=f"seq_len is {most + 1}; this checkpoint has positions for 1 to {most}"):
        spec_from_config(config, {"seq_len": most + 1})
