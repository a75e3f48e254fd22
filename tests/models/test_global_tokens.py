"""A limit of the global tokens of Longformer and LED: the same answers, from shapes that do not depend on values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers_models import largest_error, randomize, run_ours

from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.models.checkpoints.led import led_from_spec
from effexport.models.checkpoints.led_spec import LEDSpec
from effexport.models.checkpoints.longformer import Longformer, global_tokens, slots_for_globals
from effexport.models.checkpoints.longformer_spec import RULES, BandedModelSpec, LongformerSpec, globals_of_feeds
from effexport.models.checkpoints.spec import checkpoint_from_dict
from effexport.models.contract import GLOBAL_MASK
from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError
from effexport.proof.inputs import random_inputs
from effexport.runners.feeds import checked_feeds, limits_from_spec

pytestmark = pytest.mark.requires("torch")

# As of Longformer: float32, added in other orders.
LIMIT = 2e-5
SEP, PAD, MOST = 2, 1, 5
TASKS = list(LongformerSpec.TASKS)


def spec_of(task: str = "base", most: int | None = MOST, **fields: Any) -> LongformerSpec:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 602, "attention_window": 4}
    config = {"architectures": [LongformerSpec.TASKS[task]], **sizes, **fields}
    return LongformerSpec.from_config(config, {} if most is None else {"global_tokens": most})[0]


def led_of(task: str = "encoder", most: int | None = MOST) -> LEDSpec:
    sizes: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
    sizes |= {"max_encoder_position_embeddings": 600, "attention_window": 4}
    return LEDSpec.from_config(sizes, {"task": task} | ({} if most is None else {"global_tokens": most}))[0]


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


SPECS: list[Any] = [*map(spec_of, TASKS), led_of(), led_of("seq2seq-lm")]


def model_of(spec: Any) -> torch.nn.Module:
    module = led_from_spec(spec) if isinstance(spec, LEDSpec) else Longformer(spec)
    randomize(module.eval(), 0)
    return module


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.title)
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
            assert largest_error(run_ours(bounded, tensors(case)), run_ours(free, tensors(case))) <= LIMIT


@pytest.mark.parametrize(("spec", "fused"), [(spec_of("masked-lm"), True), (spec_of("question-answering"), False)])
@torch.no_grad()
def test_an_exported_program_has_free_sizes_and_none_that_depends_on_values(spec: LongformerSpec, fused: bool) -> None:
    module = model_of(spec)
    dynamic = tuple(dict.fromkeys(range(len(dims)), torch.export.Dim.DYNAMIC) for dims in spec.inputs.values())
    with fused_operators(module, fused):
        exported = torch.export.export(module, tensors(drawn(spec, 2, 20)), dynamic_shapes=dynamic)
    assert not [node for node in exported.graph.nodes if "nonzero" in str(node.target)]
    program = exported.module()
    for batch, seq_len in ((2, 2), (3, 7), (1, 256), (1, 601 - 1)):
        given = tensors(drawn(spec, batch, seq_len))
        assert largest_error(run_ours(program, given), run_ours(module, given)) <= LIMIT


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
    spec = spec_of(task, most=None)
    for seq_len in (1, 2, 9, 60):
        inputs = drawn(spec, 3, seq_len, seed=seq_len)
        # most rows without marks, so that the rule speaks
        inputs[GLOBAL_MASK][1:] = 0
        ids, mask, marks = (x.flatten(0, -2) for x in tensors(inputs)[:3])
        expected = global_tokens(spec, ids, mask != 0, marks)
        found = globals_of_feeds(spec, inputs)
        assert found.shape == inputs[GLOBAL_MASK].shape
        assert np.array_equal(found.reshape(expected.shape), expected.numpy())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.title)
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
    spec = spec_of(task, type_vocab_size=1)
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
    spec = spec_of()
    assert spec.to_dict()["global_tokens"] == MOST
    assert "global_tokens" not in spec_of(most=None).to_dict()
    for one in (spec, spec_of(most=None), led_of(), led_of(most=None)):
        assert checkpoint_from_dict(one.to_dict()) == one
        assert one.build_options["global_tokens"] == one.global_tokens
    notes = LongformerSpec.from_config({"architectures": ["LongformerModel"]}, {"global_tokens": MOST})[1]
    assert f"A sequence may have at most {MOST} global tokens; more are refused." in notes
    assert (spec.shapes_of_values, bool(spec_of(most=None).shapes_of_values)) == ("", True)


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
    for make in (spec_of, led_of):
        with pytest.raises(SpecError, match=message):
            make(most=most)
