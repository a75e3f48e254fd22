"""Figures of scores, and whether their intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from effexport.tasks.figures import Estimate, Scores, changes, differences, estimates_of, share


def scores(nats: list[float], asked: list[int], right: list[int], answers: list[int] | None = None) -> Scores:
    given = np.zeros(sum(asked), np.int32) if answers is None else np.array(answers, np.int32)
    return Scores(np.array(nats), np.array(asked), np.array(right), np.array(asked), given)


def figures(found: list[Estimate]) -> dict[str, Estimate]:
    return {estimate.name: estimate for estimate in found}


def test_figures_are_totals_over_all_answers() -> None:
    found = figures(estimates_of(scores([8.0, 4.0], [4, 2], [1, 2]), language=True))
    assert found["loss"].value == 2.0
    assert found["perplexity"].value == pytest.approx(math.exp(2))
    assert found["bits per byte"].value == pytest.approx(2 / math.log(2))
    assert found["accuracy"].value == 0.5
    assert "perplexity" not in figures(estimates_of(scores([8.0], [4], [1]), language=False))


def test_rows_of_one_size_have_the_interval_of_a_mean() -> None:
    nats = np.random.default_rng(0).gamma(2.0, size=30)
    loss = figures(estimates_of(scores(list(nats), [1] * 30, [0] * 30), language=False))["loss"]
    half = 1.96 * nats.std(ddof=1) / math.sqrt(30)
    assert (loss.low, loss.high) == pytest.approx((nats.mean() - half, nats.mean() + half))


def test_a_perplexity_beyond_float64_is_infinite() -> None:
    assert figures(estimates_of(scores([800.0], [1], [0]), language=True))["perplexity"].value == math.inf


def test_one_row_has_no_interval() -> None:
    for estimate in estimates_of(scores([8.0], [4], [1]), language=True):
        assert (estimate.low, estimate.high) == (None, None)


@pytest.mark.parametrize("alike", [False, True], ids=["independent", "alike-within-a-row"])
def test_nineteen_of_twenty_intervals_of_an_accuracy_hold_the_truth(alike: bool) -> None:
    """Also if the answers of a row depend on each other, where an interval that took them for independent would hold it
    in three of five cases only."""
    generator, truth, held = np.random.default_rng(1), 0.8, 0
    for _ in range(1000):
        sizes = generator.integers(5, 15, 60)
        chances = generator.beta(2, 0.5, 60) if alike else np.full(60, truth)
        low, high = interval_of(share("accuracy", generator.binomial(sizes, chances), sizes))
        held += low <= truth <= high
    # three standard deviations of 1000 draws are 2 %
    assert 0.93 <= held / 1000 <= 0.97


def interval_of(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def test_an_accuracy_without_mistakes_is_not_certain() -> None:
    low, high = interval_of(share("accuracy", np.full(20, 5), np.full(20, 5)))
    # Wilson's interval for 20 of 20
    assert (low, high) == pytest.approx((20 / (20 + 1.96**2), 1.0))


def test_a_difference_is_known_better_than_its_parts() -> None:
    nats = np.random.default_rng(2).gamma(2.0, size=40)
    first = scores(list(nats), [2] * 40, [1] * 40, [3] * 80)
    second = scores(list(nats + 0.01), [2] * 40, [1] * 40, [3] * 79 + [4])
    loss = figures(differences(first, second, language=False))["loss"]
    assert loss.value == pytest.approx(-0.005)
    assert interval_of(loss) == pytest.approx((-0.005, -0.005))
    assert (changes(first, second).count, changes(first, second).of) == (1, 80)
