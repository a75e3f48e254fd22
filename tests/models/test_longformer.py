"""Longformer checkpoints, beyond test_published.py: which tokens are global, and how many; LED has them from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import originals
import pytest
import torch
from originals import HEADS, LIMIT, both_models, config_of, error_of, token_inputs
from torch import Tensor
from transformers_models import randomize

from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.models.checkpoints.led import led_from_spec
from effexport.models.checkpoints.led_spec import LEDSpec
from effexport.models.checkpoints.longformer import (
    BLOCK,
    Longformer,
    counts,
    global_tokens,
    rows_of,
    slots_for_globals,
)
from effexport.models.checkpoints.longformer_spec import (
    GLOBAL_PROJECTIONS,
    RULES,
    BandedModelSpec,
    LongformerSpec,
    globals_of_feeds,
)
from effexport.models.checkpoints.spec import checkpoint_from_dict
from effexport.models.contract import GLOBAL_MASK
from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError
from effexport.proof.inputs import random_inputs
from effexport.runners.runner import checked_feeds, limits_from_spec

pytestmark = pytest.mark.requires("torch", "transformers")

SEP, PAD = 2, 1
TASKS = [task for family, task in HEADS if family == "longformer"]
spec_of, notes_of = partial(originals.spec_of, "longformer"), partial(originals.notes_of, "longformer")


@pytest.mark.parametrize("task", TASKS)
@torch.no_grad()
def test_without_the_input_the_rule_of_the_task_is_that_of_transformers(task: str) -> None:
    original, module = both_models(config_of("longformer", task))
    spec = module.spec
    for seq_len in (4, 9, 40, 101):
        inputs, generator = token_inputs(spec, 4, seq_len, seq_len), torch.Generator().manual_seed(seq_len)
        ids, mask = (inputs[name].view(-1, seq_len) for name in ("input_ids", "attention_mask"))
        ids.masked_fill_(ids == SEP, SEP + 1)
        for row in range(len(ids)):
            # transformers counts separators in padding too, where no tokenizer puts any, and takes exactly three
            places = torch.randperm(seq_len, generator=generator)[:3]
            ids[row, places], mask[row, places] = SEP, 1
        inputs[GLOBAL_MASK].zero_()
        given = {name: value for name, value in inputs.items() if name != GLOBAL_MASK}
        found = module(*inputs.values())
        assert error_of(spec, inputs, found, original(**given)) <= LIMIT
        if task in RULES:  # zeros, which transformers takes as they are
            assert error_of(spec, inputs, found, original(**inputs)) > 100 * LIMIT


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5000])
def test_counts_are_cumulative_sums(length: int) -> None:
    counted = torch.rand(3, length, generator=torch.Generator().manual_seed(length)) < 0.7
    assert torch.equal(counts(counted), counted.long().cumsum(dim=1))


def test_only_wanted_tokens_are_projected_and_the_first() -> None:
    for wanted, tokens, row in (
        ([0, 0, 1, 1, 0], [0, 2, 3], [0, 0, 1, 2, 0]),
        ([1, 0, 1], [0, 2], [0, 0, 1]),
        ([0, 0], [0], [0, 0]),
        ([1, 1], [0, 1], [0, 1]),
    ):
        assert [x.tolist() for x in rows_of(torch.tensor(wanted) == 1)] == [tokens, row]


@torch.no_grad()
@pytest.mark.parametrize("marks", [[[0] * 9], [[0, 0, 1] + [0] * 6] * 2, [[0] * 9, [0] * 8 + [1]]])
def test_as_few_rows_as_can_be_go_through_the_projections_of_global_tokens(marks: list[list[int]]) -> None:
    module, seen = model_of(spec_of()), {}
    layer = module.blocks[1].attention
    for name in ("query", *GLOBAL_PROJECTIONS):
        layer.get_submodule(name).register_forward_hook(
            lambda _, inputs, __, name=name: seen.update({name: inputs[0].shape[1]})
        )
    inputs = token_inputs(spec_of(), len(marks), 9)
    inputs = inputs | {GLOBAL_MASK: torch.tensor(marks), "attention_mask": torch.ones(len(marks), 9)}
    module(*inputs.values())
    queries, keys = (2, 9) if any(map(any, marks)) else (1, 1)
    assert seen == {"query": 9, "query_global": queries, "key_global": keys, "value_global": keys}


def test_the_rule_counts_the_separators_of_a_sequence_and_not_those_of_its_padding() -> None:
    ids = torch.tensor([[5, 6, SEP, SEP, 7, 8], [5, 6, 7, SEP, PAD, SEP], [5, 6, 7, 8, 9, SEP]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]) == 1
    expected = {
        "base": [[], [], []],
        "sequence-classification": [[0], [0], [0]],
        "question-answering": [[0, 1], [0, 1, 2], []],
        "multiple-choice": [[4, 5], [], []],
    }
    for task, places in expected.items():
        found = global_tokens(spec_of(task), ids, keep, torch.zeros_like(ids))
        assert [row.nonzero().flatten().tolist() for row in found] == places, task
        # given tokens stand for those of the rule, row by row, unless they are padding
        given = torch.zeros_like(ids)
        given[0, 5] = given[1, 5] = 1
        found = global_tokens(spec_of(task), ids, keep, given)
        assert [row.nonzero().flatten().tolist() for row in found] == [[5], *places[1:]], task


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("multiple-choice", type_vocab_size=3, attention_window=[4, 8])
    dims = ("batch", "choices", "seq")
    assert spec.inputs == dict.fromkeys(["input_ids", "attention_mask", GLOBAL_MASK, "token_type_ids"], dims)
    assert spec.outputs == {"logits": ("batch", "choices")}
    assert spec.input_limits == {"input_ids": 99, GLOBAL_MASK: 2, "token_type_ids": 3}
    assert (spec.layers, [layer.reach for layer in spec.layer_specs]) == (2, [2, 4])
    assert (spec_of().custom_ops(fused=True), spec_of().custom_ops(fused=False)) == ({"BandedAttention": 2}, {})
    assert spec.custom_ops(fused=True) == {"BandedAttention": 2}
    assert (spec.seq_len, spec.max_seq_len, spec.why_not_invariant) == (200, 200, "")
    # one kind of segment is no input, and no band is wider than a sequence
    wide = spec_of(type_vocab_size=1, attention_window=100_000)
    assert list(wide.inputs) == ["input_ids", "attention_mask", GLOBAL_MASK]
    assert {layer.reach for layer in wide.layer_specs} == {199}
    assert spec_of(max_position_embeddings=100_000).seq_len == 4096
    assert spec_of(architectures="absent").task == "base"


def test_the_proof_draws_few_global_tokens_and_many_that_a_rule_looks_for() -> None:
    spec = spec_of("question-answering")
    inputs = random_inputs(BuildSpec(model=spec), np.random.default_rng(0), 4, 5000, None)
    shares = {value: float((inputs["input_ids"] == value).mean()) for value in (PAD, SEP)}
    assert all(0.02 < share < 0.06 for share in shares.values())
    assert 0.001 < inputs[GLOBAL_MASK].mean() < 0.004


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_window": 5}, "attention_window is 5; half of it lies on each side.*must be even.*4 or 6"),
        ({"attention_window": 0}, "attention_window is 0; expected positive even numbers"),
        ({"attention_window": -4}, "attention_window is -4; expected positive even numbers"),
        ({"attention_window": [4, 3]}, r"attention_window is \[4, 3\]; half of it"),
        ({"attention_window": [4]}, "attention_window is a list of 1; expected 2, one for each layer"),
        ({"attention_window": []}, r"attention_window is \[\]; expected an even number"),
        ({"attention_window": "4"}, "attention_window is '4'; expected an even number"),
        ({"attention_window": [4, True]}, r"attention_window is \[4, True\]; expected an even number"),
        ({"attention_window": None}, "attention_window is None; expected an even number"),
        ({"attention_window": 2**40}, "attention_window is 1099511627776; expected at most 2147483647"),
        ({"is_decoder": True}, "is_decoder is true, with which transformers hides all tokens but the first"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is .*layers differ in width"),
        ({"max_position_embeddings": 2}, "max_position_embeddings is 2, and positions begin at pad_token_id . 1 = 2"),
        ({"pad_token_id": None}, "pad_token_id is None; expected int"),
        ({"pad_token_id": 99}, "pad_token_id is 99; expected a token, 0 to 98"),
        ({"num_attention_heads": 3}, "hidden_size 32 cannot be split into 3 heads"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"architectures": ["LongformerForCausalLM"]}, r"architectures is \['LongformerForCausalLM'\]"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        spec_of(**fields)
    assert "\n" not in str(error.value)


def test_tasks_with_separators_need_one_and_questions_two_labels() -> None:
    assert spec_of(sep_token_id=None).sep_token_id is None
    with pytest.raises(SpecError, match="sep_token_id is null; the task multiple-choice needs it, because the tokens"):
        spec_of("multiple-choice", sep_token_id=None)
    with pytest.raises(SpecError, match="num_labels is 3; the task question-answering has 2"):
        spec_of("question-answering", num_labels=3)
    with pytest.raises(SpecError, match="seq_len is 201; this checkpoint has positions for 1 to 200"):
        spec_of("base", {"seq_len": 201})


def test_feeds_that_do_not_fit_are_refused_before_the_graph_runs() -> None:
    build = BuildSpec(model=spec_of())
    limits = limits_from_spec(build)

    def feeds(seq_len: int, **others: Any) -> dict[str, Any]:
        return {"input_ids": np.full((2, seq_len), 5), **others}

    complete = checked_feeds(feeds(7), build.inputs, limits)
    assert not complete[GLOBAL_MASK].any()
    assert complete[GLOBAL_MASK].shape == (2, 7)
    wrong: list[tuple[dict[str, Any], str]] = [
        (feeds(7, global_attention_mask=np.ones((2, 6), np.int64)), "seq is 7 in 'input_ids'"),
        (feeds(7, global_attention_mask=np.ones((1, 7), np.int64)), "batch is 2 in 'input_ids'"),
        (feeds(7, global_attention_mask=np.ones((2, 7), bool)), "expected global_attention_mask int64"),
        (feeds(7, global_attention_mask=np.full((2, 7), 2)), "global_attention_mask contains 2; expected 0 to 1"),
        (feeds(201), "the sequence has 201 tokens; this model has positions for 200"),
    ]
    for given, message in wrong:
        with pytest.raises(UserError, match=message) as error:
            checked_feeds(given, build.inputs, limits)
        assert "\n" not in str(error.value)


def test_notes_say_which_tokens_are_global_and_what_transformers_refuses() -> None:
    assert "Tokens are global where global_attention_mask is 1; without this input, none are." in notes_of()
    assert "where a sequence has none, the first token is, as in transformers" in notes_of("sequence-classification")
    notes = notes_of("question-answering")
    assert "where a sequence has none, the tokens before the first separator are" in notes
    assert "takes sequences with exactly three separators only; here, the first one counts" in notes
    assert "exactly three separators" not in notes_of("masked-lm")
    assert "pads to a multiple of 6, and fails where that is no multiple" in notes_of(attention_window=[4, 6])
    assert "pads to a multiple" not in notes_of(attention_window=[4, 8])
    assert "not pad_token_id 1" in notes
    assert "seq_len is 4096, the default limit" in notes_of(max_position_embeddings=10_000)


# The most global tokens of a sequence.
MOST = 5


def bounded(task: str = "base", most: int | None = MOST, **fields: Any) -> LongformerSpec:
    options = {} if most is None else {"global_tokens": most}
    return spec_of(task, options, vocab_size=40, max_position_embeddings=602, **fields)


def led_of(task: str = "encoder", most: int | None = MOST) -> Any:
    options = {"task": task} | ({} if most is None else {"global_tokens": most})
    return originals.spec_of("led", task, options, vocab_size=40, max_encoder_position_embeddings=600)


def drawn(spec: BandedModelSpec, batch: int, seq_len: int, seed: int = 0) -> dict[str, Any]:
    lengths = [seq_len, max(1, seq_len // 2), 1][:batch]
    return random_inputs(BuildSpec(model=spec), np.random.default_rng(seed), batch, seq_len, lengths)


def tensors(inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.asarray(value)) for value in inputs.values())


def marked(spec: BandedModelSpec, inputs: Mapping[str, Any], counts: list[int]) -> dict[str, Any]:
    """The inputs with so many kept tokens of each sequence marked, some of them the last ones."""
    marks = np.zeros_like(inputs[GLOBAL_MASK])
    for row, keep, count in zip(marks, inputs["attention_mask"], counts, strict=True):
        row[np.flatnonzero(keep)[::-1][: count // 2]] = 1
        row[np.flatnonzero(keep & (row == 0))[: count - count // 2]] = 1
    return {**inputs, GLOBAL_MASK: marks}


BOUNDED: list[Any] = [*map(bounded, TASKS), led_of(), led_of("seq2seq-lm")]


def model_of(spec: Any) -> Any:
    module = led_from_spec(spec) if isinstance(spec, LEDSpec) else Longformer(spec)
    randomize(module.eval(), 0)
    return module


def error_between(spec: Any, case: Mapping[str, Any], found: Any, expected: Any) -> float:
    """Of two programs on the same inputs."""
    given = dict(zip(case, tensors(case), strict=True))
    answers = expected(*given.values())
    named = dict(zip(spec.outputs, answers if isinstance(answers, tuple) else (answers,), strict=True))
    return error_of(spec, given, found(*given.values()), named)


@pytest.mark.parametrize("spec", BOUNDED, ids=lambda spec: spec.title)
@torch.no_grad()
def test_a_limit_changes_no_answer(spec: Any) -> None:
    bounded, free = model_of(spec), model_of(replace(spec, global_tokens=None))
    for batch, seq_len in ((1, 1), (2, 3), (3, 16), (3, 300)):
        inputs = drawn(spec, batch, seq_len, seed=seq_len)
        cases = [inputs]
        if inputs[GLOBAL_MASK].ndim == 2:
            kept = [min(int(row.sum()), count) for row, count in zip(inputs["attention_mask"], (5, 0, 3), strict=False)]
            cases.append(marked(spec, inputs, kept))
        for case in cases:
            assert error_between(spec, case, bounded, free) <= LIMIT


@pytest.mark.parametrize(("spec", "fused"), [(bounded("masked-lm"), True), (bounded("question-answering"), False)])
@torch.no_grad()
def test_an_exported_program_has_free_sizes_and_none_that_depends_on_values(spec: LongformerSpec, fused: bool) -> None:
    module = model_of(spec)
    dynamic = tuple(dict.fromkeys(range(len(dims)), torch.export.Dim.DYNAMIC) for dims in spec.inputs.values())
    with fused_operators(module, fused):
        exported = torch.export.export(module, tensors(drawn(spec, 2, 20)), dynamic_shapes=dynamic)
    assert not [node for node in exported.graph.nodes if "nonzero" in str(node.target)]
    program = exported.module()
    for batch, seq_len in ((2, 2), (3, 7), (1, 256), (1, 601 - 1)):
        assert error_between(spec, drawn(spec, batch, seq_len), program, module) <= LIMIT


def test_every_global_token_has_a_slot_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    for seq_len, share, most in ((1, 1.0, 1), (7, 0.3, 7), (7, 0.0, 3), (600, 0.1, 100), (5, 1.0, 9)):
        is_global = torch.rand(3, seq_len, generator=generator) < share
        places, slots = slots_for_globals(is_global, most)
        assert places.shape == (3 * most,)
        found = places[slots].reshape(3, seq_len)
        own = torch.arange(3 * seq_len).reshape(3, seq_len)
        assert torch.equal(found[is_global], own[is_global])
        # places of no token are those of the same sample
        assert torch.equal(places.reshape(3, most) // seq_len, torch.arange(3)[:, None].expand(3, most))


@pytest.mark.parametrize("task", TASKS)
def test_tokens_are_counted_as_the_model_finds_them(task: str) -> None:
    spec = bounded(task, most=None)
    for seq_len in (1, 2, 9, 60):
        inputs = drawn(spec, 3, seq_len, seed=seq_len)
        # most rows without marks, so that the rule speaks
        inputs[GLOBAL_MASK][1:] = 0
        ids, mask, marks = (x.flatten(0, -2) for x in tensors(inputs)[:3])
        expected = global_tokens(spec, ids, mask != 0, marks)
        found = globals_of_feeds(spec, inputs)
        assert found.shape == inputs[GLOBAL_MASK].shape
        assert np.array_equal(found.reshape(expected.shape), expected.numpy())


@pytest.mark.parametrize("spec", BOUNDED, ids=lambda spec: spec.title)
def test_the_proof_draws_what_the_model_takes_and_rules_that_hold(spec: Any) -> None:
    inputs = drawn(spec, 3, 500)
    counts = globals_of_feeds(spec, inputs).sum(axis=-1)
    assert spec.why_refused(inputs) == ""
    assert counts.max() == MOST or spec.task in RULES
    by_rule = 0
    if spec.task == "question-answering":
        for seed in range(20):
            inputs = drawn(spec, 1, 8, seed)
            by_rule += int(not inputs[GLOBAL_MASK].any() and globals_of_feeds(spec, inputs).any())
        assert by_rule > 3


def question(length: int) -> Any:
    """Two questions: the first of one token, the second of `length`, each before a separator and an answer."""
    ids = np.full((2, 40), 7, np.int64)
    ids[0, 1] = ids[1, length] = SEP
    return ids


LIMITED = f"this model was built for at most {MOST}: "
LARGER = ", or build with a larger --global-tokens"


@pytest.mark.parametrize(
    ("task", "feeds", "message"),
    [
        (
            "base",
            {"input_ids": question(3), GLOBAL_MASK: (np.arange(40) < [[2], [6]]).astype(np.int64)},
            f"a sequence has 6 global tokens in global_attention_mask; {LIMITED}mark fewer{LARGER}",
        ),
        (
            "question-answering",
            {"input_ids": question(6)},
            "a sequence has 6 global tokens, because the tokens before the first separator are where "
            f"global_attention_mask has none; {LIMITED}shorten the question{LARGER}",
        ),
        (
            "multiple-choice",
            {"input_ids": question(10)[:, None]},
            "a sequence has 37 global tokens, because the tokens behind the first two separators of each choice are "
            f"where global_attention_mask has none; {LIMITED}shorten the choices{LARGER}",
        ),
        (
            "sequence-classification",
            {"input_ids": question(10), GLOBAL_MASK: np.ones((2, 40), np.int64)},
            f"a sequence has 40 global tokens in global_attention_mask; {LIMITED}mark fewer{LARGER}",
        ),
    ],
)
def test_more_global_tokens_are_refused_before_the_graph_runs(task: str, feeds: dict[str, Any], message: str) -> None:
    spec = bounded(task, type_vocab_size=1)
    build = BuildSpec(model=spec)
    with pytest.raises(UserError) as error:
        checked_feeds(feeds, build.inputs, limits_from_spec(build))
    assert str(error.value) == message
    without_limit = limits_from_spec(BuildSpec(model=replace(spec, global_tokens=None)))
    complete = tensors(checked_feeds(feeds, build.inputs, without_limit))
    with pytest.raises(SpecError, match=f"; {LIMITED}"):
        Longformer(spec)(*complete)
    # exactly as many are taken, and more that are padding
    as_many = {"input_ids": np.full((1, 40), 7, np.int64), GLOBAL_MASK: (np.arange(40)[None] < MOST).astype(np.int64)}
    if task == "multiple-choice":
        as_many = {name: value[:, None] for name, value in as_many.items()}
    checked_feeds(as_many, build.inputs, limits_from_spec(build))
    as_many["attention_mask"] = np.copy(as_many[GLOBAL_MASK])
    as_many[GLOBAL_MASK] = np.ones_like(as_many[GLOBAL_MASK])
    checked_feeds(as_many, build.inputs, limits_from_spec(build))


def test_a_description_has_the_limit_and_one_without_is_as_before() -> None:
    spec = bounded()
    assert spec.to_dict()["global_tokens"] == MOST
    assert "global_tokens" not in bounded(most=None).to_dict()
    for one in (spec, bounded(most=None), led_of(), led_of(most=None)):
        assert checkpoint_from_dict(one.to_dict()) == one
        assert one.build_options["global_tokens"] == one.global_tokens
    notes = LongformerSpec.from_config({"architectures": ["LongformerModel"]}, {"global_tokens": MOST})[1]
    assert f"A sequence may have at most {MOST} global tokens; more are refused." in notes
    assert (spec.shapes_of_values, bool(bounded(most=None).shapes_of_values)) == ("", True)


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (0, "global_tokens is 0; expected the most global tokens of a sequence, at least 1"),
        (-3, "global_tokens is -3; expected the most global tokens"),
        (2**40, "global_tokens is 1099511627776; expected at most 2147483647"),
        (True, "global_tokens is True; expected"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(most: Any, message: str) -> None:
    for make in (bounded, led_of):
        with pytest.raises(SpecError, match=message):
            make(most=most)
