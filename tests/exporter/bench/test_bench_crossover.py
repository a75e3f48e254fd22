"""Where curves cross: exact for power laws, never beyond what was measured."""

from __future__ import annotations

import pytest

from effexport.bench.findings import crossover

LENGTHS = (512, 1024, 2048, 4096, 8192)


def power_law(scale: float, power: float, lengths: tuple[int, ...] = LENGTHS) -> dict[int, float]:
    return {length: scale * length**power for length in lengths}


@pytest.mark.parametrize("length", [600.0, 1500.0, 3000.0, 8000.0])
def test_power_laws_cross_where_they_are_equal(length: float) -> None:
    found = crossover(power_law(1.0, 1), power_law(1 / length, 2))
    assert found.outcome == "from"
    assert found.crossings == pytest.approx((length,), rel=1e-9)


def test_a_curve_that_loses_its_lead_is_faster_up_to_there() -> None:
    found = crossover(power_law(1 / 3000, 2), power_law(1.0, 1))
    assert found.outcome == "up to"
    assert str(found) == "faster up to about 3,000 tokens"


def test_curves_that_do_not_cross_say_so_with_the_measured_lengths() -> None:
    assert str(crossover(power_law(1, 1), power_law(2, 1))) == "faster at every measured length (512 to 8,192)"
    assert str(crossover(power_law(2, 1), power_law(1, 1))) == "faster at none of the measured lengths (512 to 8,192)"
    assert str(crossover({512: 1.0}, {512: 2.0})) == "faster at every measured length (512)"


def test_nothing_is_said_of_lengths_beyond_the_measured_ones() -> None:
    assert crossover(power_law(1.0, 1), power_law(1 / 9000, 2)).outcome == "never"
    assert crossover(power_law(1.0, 1), power_law(1 / 400, 2)).outcome == "always"


def test_equal_curves_are_not_faster() -> None:
    assert crossover(power_law(1, 1), power_law(1, 1)).outcome == "never"


def test_only_lengths_that_both_have_count() -> None:
    found = crossover({512: 1.0, 1024: 9.0, 2048: 1.0}, {512: 2.0, 2048: 2.0, 4096: 0.1})
    assert (found.outcome, found.shortest, found.longest) == ("always", 512, 2048)
    assert str(crossover({512: 1.0}, {1024: 1.0})) == "not compared: no length was measured of both"
    assert crossover({}, {}).outcome == "not compared"


def test_curves_may_cross_more_than_once() -> None:
    baseline = dict.fromkeys((100, 200, 400), 1.0)
    found = crossover({100: 2.0, 200: 0.5, 400: 2.0}, baseline)
    assert found.outcome == "several"
    assert found.crossings == pytest.approx((100 * 2**0.5, 200 * 2**0.5))
    assert str(found) == "faster on some stretches: the curves cross at about 141, 283 tokens"


def test_an_interpolated_length_has_three_digits_and_a_measured_one_all() -> None:
    assert "1,050 tokens" in str(crossover(power_law(1.0, 1), power_law(1 / 1053.3, 2)))
    assert "4,096 tokens" in str(crossover(power_law(1.0, 1), power_law(1 / 4096, 2)))
