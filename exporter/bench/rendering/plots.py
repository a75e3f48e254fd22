"""The charts of a benchmark: what was measured against length, with small plots for each runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from effexport.bench.rendering.beside import mean_ratios
from effexport.bench.rendering.curves import BASELINE, Curve, curves, median_ms
from effexport.bench.rendering.frontier import on_frontier
from effexport.bench.results import BenchResults, Row
from effexport.render.axes import PANEL_WIDTH, Axis, ticks_around, ticks_between
from effexport.render.multiples import Chart, Line, Quantity, chart_of
from effexport.render.svg import Figure, Point, Series, legend_of, scatter
from effexport.units import duration, memory, times

if TYPE_CHECKING:
    from effexport.bench.rendering.advise import Advice

What = Literal["latency", "memory", "ratio", "floor"]
RATIO = Quantity("Times as fast as softmax", "times as fast", times)


def _megabytes(row: Row) -> float | None:
    return None if row.peak_bytes is None else row.peak_bytes / 1e6


# each with its value in a row, in the unit of the axis
QUANTITIES: dict[What, tuple[Quantity, Callable[[Row], float | None]]] = {
    "latency": (Quantity("Latency against length", "milliseconds", duration), median_ms),
    "memory": (Quantity("Peak memory against length", "megabytes", lambda value: memory(value * 1e6)), _megabytes),
    "ratio": (RATIO, lambda row: row.times_softmax),
    "floor": (Quantity("Times the floor", "times the floor", times), lambda row: row.times_floor),
}


def bench_chart(results: BenchResults, wanted: Sequence[What] = tuple(QUANTITIES)) -> Chart | None:
    """Latency and memory, and how the times relate to softmax and to the floor; None for a benchmark of one row."""
    if len(results.rows) < 2:
        return None
    every = curves(results)
    lines: dict[Quantity, list[Line]] = {}
    for what in wanted:
        quantity, read = QUANTITIES[what]
        # a logarithmic axis has no 0, such as memory too small to be measured
        values = [(curve, {n: value for n, value in curve.values(read).items() if value > 0}) for curve in every]
        lines[quantity] = _with_even_line(values) if what == "ratio" else [_line(*entry) for entry in values]
    return chart_of("-".join(wanted), lines)


def mean_ratio_chart(results: BenchResults) -> Chart | None:
    """The chart of the blog: mean time of softmax divided by that of each model."""
    quantity = Quantity("Mean time of softmax over that of the model", RATIO.axis, RATIO.text)
    return chart_of("mean-ratio", {quantity: _with_even_line(mean_ratios(results))})


def frontier_chart(advice: Advice) -> Chart | None:
    """Loss against latency, with the frontier as a line; None unless two candidates were timed and judged."""
    points: dict[str, Point] = {}
    for entry in advice.entries:
        if entry.latency_ms is None or entry.quality is None or entry.is_disturbed:
            continue
        loss = entry.quality.loss
        interval = () if loss.low is None or loss.high is None else (loss.low, loss.high)
        label = f"{entry.name}: {entry.latency}, {entry.quality.text}"
        points[entry.name] = Point(entry.latency_ms, loss.value, label, interval)
    if len(points) < 2:
        return None
    frontier = [points[entry.name] for entry in on_frontier(advice.entries) if entry.name in points]
    line = Series("frontier", [replace(point, interval=()) for point in frontier], "baseline")
    runtimes = {entry.runtime for entry in advice.entries}
    names = {entry.name: entry.name if len(runtimes) > 1 else entry.label for entry in advice.entries}
    series = [line, *(Series(names[name], [point]) for name, point in points.items())]
    title = f"Frontier of latency against {advice.figure}"
    caption = f"On the frontier: {'; '.join(point.label for point in frontier)}."
    x = Axis("milliseconds", True, ticks_between(point.x for point in points.values()))
    y = Axis(advice.figure, ticks=ticks_around(y for point in points.values() for y in (point.y, *point.interval)))
    svg = scatter("frontier", title, caption, x, y, series, PANEL_WIDTH)
    return Chart(legend_of(series), {"": [Figure(title, caption, svg)]})


def _line(curve: Curve, values: dict[int, float]) -> Line:
    return Line(curve.label, curve.place, values, is_baseline=curve.is_baseline)


def _with_even_line(found: Sequence[tuple[Curve, dict[int, float]]]) -> list[Line]:
    """Ratios to softmax, and in each place the line for models exactly as fast as softmax."""
    ratios = [_line(curve, values) for curve, values in found if values and not curve.is_baseline]
    places: dict[str, set[int]] = {}
    for line in ratios:
        places.setdefault(line.place, set()).update(line.values)
    even = [Line(BASELINE, at, {min(n): 1.0, max(n): 1.0}, is_baseline=True) for at, n in places.items()]
    return [*even, *ratios]
