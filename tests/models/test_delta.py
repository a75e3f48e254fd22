"""The delta rules: against transformers, with hostile keys and decays, and for long; and all recurrent layers token by
token and by parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from slow_cases import named
from torch import Tensor

from effexport.models.encoder.module import module_from_spec
from effexport.models.layers import State
from effexport.models.validation import SpecError
from effexport.models.variants.delta import DeltaSpec
from effexport.models.variants.gated_delta import GatedDeltaSpec
from effexport.models.variants.gated_delta.layer import GatedDeltaAttention, exact
from effexport.models.variants.gla import GLASpec
from effexport.models.variants.mamba2 import Mamba2Spec
from effexport.models.variants.recurrence import RecurrentAttention, chunked_recurrence
from effexport.models.variants.retention import RetentionSpec
from effexport.plugins.contract import Case
from effexport.plugins.linear_recurrence.contract import CONTRACT, KINDS, SCALE

DIM, HEADS = 24, 3
# Sums in another order; results are divided by their own size, see the contract of the variant.
ROUNDING = 5e-5


def gated(**options: Any) -> GatedDeltaAttention:
    spec = GatedDeltaSpec(**{"dim": DIM, "heads": HEADS, "seq_len": 64, "chunk_length": 8, **options})
    layer = module_from_spec(spec, 0)
    assert isinstance(layer, GatedDeltaAttention)
    return layer


def hidden(batch: int, seq_len: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, seq_len, DIM, generator=torch.Generator().manual_seed(seed))


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a fraction of the RMS of `expected`."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return float((actual.double() - expected.double()).abs().max() / expected.double().square().mean().sqrt())


@pytest.mark.requires("transformers")
@torch.no_grad()
def test_the_gated_rule_is_that_of_qwen3_next() -> None:
    from bench_claims import layer_of_qwen3_next  # with all that it measures: not while tests are collected

    for options in ({}, {"value_dim": 5, "conv_size": 2}, {"head_dim": 16, "norm_eps": 1e-3}):
        layer = gated(bias=False, **{"norm_eps": 1e-6, **options})
        oracle = layer_of_qwen3_next(layer)
        for seq_len in (1, 9, 63, 100):
            x, mask = hidden(2, seq_len), torch.ones(2, seq_len, dtype=torch.int64)
            mask[1, : seq_len // 3] = 0  # on the left, as transformers pads prompts
            expected = oracle(x, attention_mask=mask)[mask != 0]
            with named((options, seq_len)):
                # norm_eps 1e-6 magnifies the roundings of sums that cancel up to 1000 times
                assert error(layer(x, mask)[mask != 0], expected) <= 2e-4


def layers() -> Iterator[RecurrentAttention]:
    yield gated()
    yield gated(conv_size=0, value_dim=5)
    sizes: dict[str, Any] = {"dim": DIM, "heads": HEADS, "seq_len": 64}
    for spec in (
        DeltaSpec(**sizes, chunk_length=16, conv_size=3),
        RetentionSpec(**sizes),
        GLASpec(**sizes, value_dim=5),
        Mamba2Spec(**sizes, chunk_length=8, groups=3, value_dim=5),
    ):
        layer = module_from_spec(spec, 0)
        assert isinstance(layer, RecurrentAttention)
        yield layer


def stepped(layer: RecurrentAttention, x: Tensor, state: State) -> tuple[Tensor, State]:
    """All tokens, one by one."""
    outputs = []
    for token in x.split(1, dim=1):
        output, state = layer.step(token, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


@torch.no_grad()
def test_a_prompt_its_parts_and_its_tokens_give_the_same_results_and_state() -> None:
    for layer in layers():
        x, keep = hidden(2, 61), torch.ones(2, 61, dtype=torch.bool)
        expected, after = stepped(layer, x, layer.initial_state(2))
        for ends in ((61,), (1, 61), (2, 3, 31, 61), (8, 16, 24, 61)):
            state, outputs = layer.initial_state(2), []
            for start, end in itertools.pairwise((0, *ends)):
                output, state = layer.prefill(x[:, start:end], keep[:, start:end], state)
                outputs.append(output)
            with named((layer.spec.label, ends)):
                assert error(torch.cat(outputs, dim=1), expected) <= ROUNDING
                assert list(state) == list(after)
                assert all(error(state[name], after[name]) <= ROUNDING for name in after)


@torch.no_grad()
def test_hidden_tokens_are_as_if_they_were_not_there() -> None:
    """Before, between and after the tokens of a sample, also after others."""
    for layer in layers():
        x = hidden(2, 20)
        before = layer.prefill(hidden(2, 7, 1), torch.ones(2, 7, dtype=torch.bool), layer.initial_state(2))[1]
        for first, places in itertools.product(
            (layer.initial_state(2), before),
            (range(5, 25), range(20), range(3, 63, 3), [*range(4, 20), *range(25, 29)]),
        ):
            expected, after = stepped(layer, x, first)
            kept = torch.tensor(list(places))
            padded, keep = torch.full((2, 64, DIM), 1e4), torch.zeros(2, 64, dtype=torch.bool)
            padded[:, kept], keep[:, kept] = x, True
            given, state = layer.prefill(padded, keep, first)
            with named((layer.spec.label, places)):
                assert error(given[:, kept], expected) <= ROUNDING
                assert all(error(state[name], after[name]) <= ROUNDING for name in after)
        # a sample without a token keeps its state, to the bit
        _, state = layer.prefill(x, torch.zeros(2, 20, dtype=torch.bool), before)
        assert all(torch.equal(state[name], before[name]) for name in before)


@torch.no_grad()
def test_hostile_keys_steps_and_decays_give_what_float64_gives() -> None:
    x = hidden(2, 90)
    keep = torch.ones(2, 90, dtype=torch.bool)
    rows = {
        "equal tokens": (x[:, :1].expand_as(x), {}),
        "zero tokens": (torch.where(torch.arange(90)[:, None] % 3 == 0, 0.0, x), {}),
        "long keys": (x, {"key.weight": 30.0}),
        "the state is kept": (x, {"a_log": -20.0}),
        "the state is forgotten": (x, {"a_log": 6.0}),
        "every token overwrites": (x, {"beta.weight": 100.0}),
    }
    for name, (tokens, changes) in rows.items():
        layer = gated()
        for parameter, value in changes.items():
            given = layer.get_parameter(parameter)
            given.copy_(given * value if given.dim() > 1 else torch.full_like(given, value))
        with named(name):
            assert error(layer.attend(tokens, keep), exact(layer, tokens, keep)) <= ROUNDING


def test_chunks_compute_what_the_contract_of_the_operator_says() -> None:
    """Also for decays per channel, and without the delta rule."""
    for kind, delta, channels, seq in itertools.product(KINDS, (0, 1), (0, 1), (1, 33, 300)):
        case = Case((2, seq, 2, 2, 6, 5, delta, channels), SCALE, kind)
        inputs = CONTRACT.inputs(case, "cpu")
        for chunk in (4, 32):
            given = chunked_recurrence(*inputs.values(), SCALE[0], bool(delta), chunk)  # type: ignore[call-arg]
            with named((kind, delta, channels, seq, chunk)):
                for actual, expected in zip(given, CONTRACT.exact(case, inputs).values(), strict=True):
                    # of the largest value, as the limit of the operator
                    largest = expected.abs().max().clamp(min=1e-30)
                    assert (actual - expected).abs().max() <= CONTRACT.limit(case).value * largest


def test_other_forms_and_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(SpecError, match="gated-delta attention has no other form than the causal one, because a token"):
        GatedDeltaSpec(causal=False)
    for options, message in (
        ({"conv_size": 1}, "conv_size is 1; expected at least 2 taps, or 0"),
        ({"value_dim": 0}, "value_dim is 0; expected at least 1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; expected a number > 0"),
        ({"chunk_length": 0}, "chunk_length is 0; expected at least 1"),
    ):
        with pytest.raises(SpecError, match=message):
            GatedDeltaSpec(**options)


@pytest.mark.soak
@torch.no_grad()
def test_a_state_does_not_drift_within_a_hundred_thousand_tokens() -> None:
    x, keep = hidden(1, 100_000), torch.ones(1, 100_000, dtype=torch.bool)
    for layer in (gated(chunk_length=32), next(itertools.islice(layers(), 2, None))):
        (given, state), exact_layer = layer.prefill(x, keep, layer.initial_state(1)), layer.double()
        expected, after = exact_layer.prefill(x.double(), keep, exact_layer.initial_state(1))
        assert error(given[:, -1000:], expected[:, -1000:]) <= ROUNDING
        assert error(state["s"], after["s"]) <= ROUNDING
