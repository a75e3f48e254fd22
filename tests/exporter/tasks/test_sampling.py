"""The choice of the next token, against the formula written out, and settings that cannot work."""

from __future__ import annotations

import math

import numpy as np
import pytest

from effexport.base.errors import UserError
from effexport.tasks.sampling import Sampling
from effexport.tasks.text_generator import next_token


def token_by_the_formula(logits: list[float], temperature: float, top_k: int | None, u: float) -> int:
    """The first token at which the sum of the probabilities exceeds u, in Python's own numbers."""
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    weights = {token: math.exp(logits[token] / temperature) for token in kept}
    total, below = math.fsum(weights.values()), 0.0
    for token in sorted(kept):
        below += weights[token] / total
        if below > u:
            return token
    return max(kept)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100, 1000])
def test_tokens_are_those_of_the_formula_for_the_same_random_numbers(temperature: float, top_k: int | None) -> None:
    rng = np.random.default_rng(1)
    sampling = Sampling(temperature=temperature, top_k=top_k)
    ours, theirs = np.random.default_rng(7), np.random.default_rng(7)
    for _ in range(50):
        # quarters, so that many logits are equal and top_k has to cut among them
        logits = np.round(rng.standard_normal(258) * 3 * 4) / 4
        expected = token_by_the_formula(logits.tolist(), temperature, top_k, theirs.random())
        assert next_token(logits.astype(np.float32), sampling, ours) == expected


def test_frequencies_are_the_probabilities() -> None:
    logits, rng, draws = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32)), np.random.default_rng(0), 20_000
    counts = np.bincount([next_token(logits, Sampling(), rng) or 0 for _ in range(draws)], minlength=4)
    # four standard deviations of a binomial count
    assert np.all(np.abs(counts / draws - [0.5, 0.25, 0.15, 0.1]) < 4 * np.sqrt(0.25 / draws))


def test_greedy_takes_the_first_of_the_largest_and_draws_no_random_number() -> None:
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert next_token(np.array([0, 3, 1, 3], dtype=np.float32), Sampling(temperature=0), rng) == 1
    assert rng.bit_generator.state == before


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=2)])
def test_nan_and_infinity_choose_nothing(bad: float, sampling: Sampling) -> None:
    assert next_token(np.array([0, 5, bad, 1], dtype=np.float32), sampling, np.random.default_rng(0)) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; expected an integer"),
        ({"temperature": -1.0}, "temperature is -1; expected 0, which is greedy, or at least 1e-06"),
        ({"temperature": math.nan}, "temperature is nan; expected a finite number"),
        ({"top_k": 0}, "top_k is 0; expected at least 1"),
        ({"seed": -1}, "seed is -1; expected 0 to 2^63 - 1"),
        ({"stop_at_eos": 1}, "stop_at_eos is 1; expected true or false"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        Sampling(**fields)  # type: ignore[arg-type]
    assert str(error.value) == message
