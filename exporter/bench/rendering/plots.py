"""The plots of a benchmark: a colour and a mark for each model, dashes for each runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from effexport.bench.rendering.curves import BASELINE, Curve, curves, median_ms
from effexport.bench.results import BenchResults, Row
from effexport.plots.axes import Axis
from effexport.plots.svg import Figure, Look, Point, Series, scatter
from effexport.units import duration, memory, times

What = Literal["latency", "memory", "ratio", "floor"]
# With more lines than this, a plot is unreadable; lower bounds are drawn if there is room for them.
MAX_LINES, MAX_LINES_WITH_FLOORS = 8, 5
# Candidate positions of labels within each power of the base, as close as there is room for.
MAX_TICKS = 8
STEPS: dict[int, tuple[tuple[float, ...], ...]] = {10: ((1, 2, 5), (1,)), 2: ((1, 1.5), (1,))}


@dataclass(frozen=True)
class Quantity:
    """A quantity to plot. read: its value in the unit of the axis. text: a value in words. base: that of the ticks."""

    title: str
    axis: str
    read: Callable[[Row], float | None]
    text: Callable[[float], str]
    base: int = 10


def _megabytes(row: Row) -> float | None:
    return None if row.peak_bytes is None else row.peak_bytes / 1e6


QUANTITIES: dict[What, Quantity] = {
    "latency": Quantity("Latency against length", "milliseconds", median_ms, duration),
    "memory": Quantity("Peak memory against length", "megabytes", _megabytes, lambda value: memory(value * 1e6)),
    "ratio": Quantity("Times as fast as softmax", "times as fast", lambda row: row.times_softmax, times, base=2),
    "floor": Quantity("Times the floor", "times the floor", lambda row: row.times_floor, times, base=2),
}


def figures(results: BenchResults) -> list[Figure]:
    """Latency and memory, then how both relate to softmax and to the floor; one plot per place if there are many."""
    if len(results.rows) < 2:
        return []
    return [figure for what in QUANTITIES for figure in figures_of(results, what)]


def figures_of(results: BenchResults, what: What) -> list[Figure]:
    """The plots of one quantity, one for each place if there are many curves; none without values."""
    quantity, every = QUANTITIES[what], curves(results)
    looks = looks_of(every)
    drawn = [curve for curve in every if _points(curve, quantity) and not (what == "ratio" and curve.is_baseline)]
    reach = [1.0] if what == "ratio" else []
    ticks = ticks_between([*reach, *(point.y for curve in drawn for point in _points(curve, quantity))], quantity.base)
    places = list(dict.fromkeys(curve.place for curve in drawn))
    if len(every) > MAX_LINES and len(places) > 1:
        return [
            _figure(f"{what}-{n}", f", {place}", [c for c in drawn if c.place == place], looks, what, ticks)
            for n, place in enumerate(places)
        ]
    return [_figure(what, "", drawn, looks, what, ticks)] if drawn else []


def looks_of(every: Sequence[Curve]) -> dict[str, Look]:
    """The look of each curve by its name, the same in every plot."""
    labels = list(dict.fromkeys(curve.label for curve in every if not curve.is_baseline))
    places = list(dict.fromkeys(curve.place for curve in every))
    return {
        curve.name: Look(-1 if curve.is_baseline else labels.index(curve.label), places.index(curve.place))
        for curve in every
    }


def ticks_between(values: Iterable[float], base: int) -> list[float]:
    """Labels of a logarithmic axis that just enclose all values, at most eight."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(known), max(known)
    powers = range(math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 2)
    for steps in STEPS[base]:
        every = [step * float(base) ** power for power in powers for step in steps]
        start = max(n for n, tick in enumerate(every) if tick <= low)
        end = next(n for n, tick in enumerate(every) if tick >= high and n > start)
        if end - start < MAX_TICKS:
            return every[start : end + 1]
    stride = math.ceil((end - start) / (MAX_TICKS - 1))
    return [every[start] * float(base) ** (stride * n) for n in range(math.ceil((end - start) / stride) + 1)]


def _figure(
    key: str, where: str, drawn: Sequence[Curve], looks: dict[str, Look], what: What, ticks: Sequence[float]
) -> Figure:
    """One plot. where: the end of its title. If all curves have the same place, names omit it and lines are solid."""
    quantity = QUANTITIES[what]
    alone = len({curve.place for curve in drawn}) == 1
    lengths = sorted({int(point.x) for curve in drawn for point in _points(curve, quantity)})
    series = []
    for curve in drawn:
        look = Look(looks[curve.name].colour, 0) if alone else looks[curve.name]
        name = curve.label if alone else curve.name
        series.append(Series(name, _points(curve, quantity), "baseline" if curve.is_baseline else "line", look))
    if what == "ratio":
        series.append(_even_line(lengths))
    if what == "latency" and alone and len(drawn) <= MAX_LINES_WITH_FLOORS:
        floors = _floors(drawn, looks)
        ticks = ticks_between([*ticks, *(point.y for one in floors for point in one.points)], quantity.base)
        series += floors
    title, caption = f"{quantity.title}{where}", _caption(drawn, quantity, lengths[-1], alone)
    y = Axis(quantity.axis, True, ticks)
    return Figure(title, caption, scatter(key, title, caption, Axis("tokens", True, lengths), y, series))


def _floors(drawn: Sequence[Curve], looks: dict[str, Look]) -> list[Series]:
    """The floor of each model in one place, with one line in the legend for all."""
    found: list[Series] = []
    for curve in drawn:
        floors = curve.values(lambda row: row.floor.total_ms if row.floor else None)
        if len(floors) > 1:
            name = "" if found else "thin: the floor (lower bound) of the model of this colour"
            points = [Point(length, value) for length, value in floors.items()]
            found.append(Series(name, points, "floor", looks[curve.name]))
    return found


def _points(curve: Curve, quantity: Quantity) -> list[Point]:
    return [
        Point(length, value, f"{curve.name}, {length:,} tokens: {quantity.text(value)}")
        for length, value in curve.values(quantity.read).items()
        # a logarithmic axis has no 0, such as memory too small to be measured
        if value > 0
    ]


def _caption(drawn: Sequence[Curve], quantity: Quantity, longest: int, alone: bool) -> str:
    """The values at the longest length, smallest first; only the first and last if there are many."""
    at_end = [(curve.values(quantity.read).get(longest), curve.label if alone else curve.name) for curve in drawn]
    known = sorted((value, name) for value, name in at_end if value is not None)
    values = [f"{name} {_unbroken(quantity.text(value))}" for value, name in known]
    if len(values) > MAX_LINES:
        values = [*values[:3], "…", *values[-3:]]
    return f"At {longest:,} tokens: {'; '.join(values)}."


def _unbroken(text: str) -> str:
    """The text with unbreakable spaces, so that a figure and its unit stay on one line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def mean_ratio_figure(ratios: Sequence[tuple[Curve, dict[int, float]]], every: Sequence[Curve]) -> Figure | None:
    """The chart of the blog: mean time of softmax divided by that of each model. every: all curves of the benchmark."""
    if not ratios:
        return None
    looks, quantity = looks_of(every), QUANTITIES["ratio"]
    lengths = sorted({length for _, values in ratios for length in values})
    series = []
    for curve, values in ratios:
        points = [Point(n, value, f"{curve.name}, {n:,} tokens: {times(value)}") for n, value in values.items()]
        series.append(Series(curve.name, points, "line", looks[curve.name]))
    series.append(_even_line(lengths))
    ticks = ticks_between([1.0, *(value for _, values in ratios for value in values.values())], quantity.base)
    texts = [
        f"{curve.name} {_unbroken(times(values[lengths[-1]]))}" for curve, values in ratios if lengths[-1] in values
    ]
    caption = f"At {lengths[-1]:,} tokens: {'; '.join(texts)}. Means, as in the blog; other ratios here are medians."
    title = "Mean time of softmax over that of the model"
    y = Axis(quantity.axis, True, ticks)
    return Figure(title, caption, scatter("mean-ratio", title, caption, Axis("tokens", True, lengths), y, series))


def _even_line(lengths: Sequence[int]) -> Series:
    """The line for models exactly as fast as softmax."""
    return Series(BASELINE, [Point(n, 1.0) for n in dict.fromkeys((lengths[0], lengths[-1]))], "baseline", Look(-1, 2))
