"""Crossovers of curves: exact for power laws, never beyond the measured lengths."""

from __future__ import annotations

import pytest

from effexport.bench.findings import crossings, crossover

LENGTHS = (512, 1024, 2048, 4096, 8192)


def power_law(scale: float, power: float, lengths: tuple[int, ...] = LENGTHS) -> dict[int, float]:
    return {length: scale * length**power for length in lengths}


@pytest.mark.parametrize("length", [600.0, 1500.0, 3000.0, 8000.0])
def test_power_laws_cross_where_they_are_equal(length: float) -> None:
    curves = power_law(1.0, 1), power_law(1 / length, 2)
    assert crossover(*curves).startswith("faster from")
    assert crossings(*curves) == pytest.approx((length,), rel=1e-9)


@pytest.mark.parametrize(
    ("candidate", "baseline", "text"),
    [
        (power_law(1 / 3000, 2), power_law(1, 1), "faster up to about 3,000 tokens"),
        (power_law(1, 1), power_law(2, 1), "faster at every measured length (512 to 8,192)"),
        (power_law(2, 1), power_law(1, 1), "faster at none of the measured lengths (512 to 8,192)"),
        ({512: 1.0}, {512: 2.0}, "faster at every measured length (512)"),
        # nothing is said of lengths beyond the measured ones
        (power_law(1, 1), power_law(1 / 9000, 2), "faster at none of"),
        (power_law(1, 1), power_law(1 / 400, 2), "faster at every"),
        # equal curves are not faster
        (power_law(1, 1), power_law(1, 1), "faster at none of"),
        # only lengths that both have count
        (
            {512: 1.0, 1024: 9.0, 2048: 1.0},
            {512: 2.0, 2048: 2.0, 4096: 0.1},
            "faster at every measured length (512 to 2,048)",
        ),
        ({512: 1.0}, {1024: 1.0}, "not compared: no length was measured of both"),
        ({}, {}, "not compared"),
        # an interpolated length has three digits and a measured one all
        (power_law(1, 1), power_law(1 / 1053.3, 2), "faster from about 1,050 tokens on"),
        (power_law(1, 1), power_law(1 / 4096, 2), "faster from about 4,096 tokens on"),
    ],
)
def test_a_crossover_in_words(candidate: dict[int, float], baseline: dict[int, float], text: str) -> None:
    assert crossover(candidate, baseline).startswith(text)


def test_curves_may_cross_more_than_once() -> None:
    curves = {100: 2.0, 200: 0.5, 400: 2.0}, dict.fromkeys((100, 200, 400), 1.0)
    assert crossings(*curves) == pytest.approx((100 * 2**0.5, 200 * 2**0.5))
    assert crossover(*curves) == "faster on some stretches: the curves cross at about 141, 283 tokens"
