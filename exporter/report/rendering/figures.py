"""The plots of reports: errors against length, per layer and as histograms, and two reports beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from effexport.base.units import number
from effexport.proof.check import HISTOGRAM_EDGES, Check, by_name, summary
from effexport.render.axes import Axis, power, ticks_from_zero
from effexport.render.svg import Figure, Point, Series, dots, histogram, legend_of, scatter
from effexport.report.compare import Comparison, Side
from effexport.report.model import LayerError, Report

_UNIT = "relative to the RMS of the reference"


def error_figures(report: Report) -> list[Figure]:
    """Errors against the length of the sequence, one plot for each way to measure; layers; histograms."""
    by_metric: dict[str, list[Check]] = {}
    for check in report.checks:
        if check.seq_len and check.value is not None and "RMS" in check.metric:
            by_metric.setdefault(check.metric, []).append(check)
    figures = [
        _error_against_length(f"length-{n}", metric, checks)
        for n, (metric, checks) in enumerate(by_metric.items())
        # where there is no error at all, the table says it in a line
        if len({check.seq_len for check in checks}) > 1 and any(check.value for check in checks)
    ]
    if report.layers:
        figures.append(_error_per_layer(report.layers))
    measured = by_name(check for check in report.checks if any(check.histogram))
    return figures + [_histogram(f"histogram-{n}", *entry) for n, entry in enumerate(measured.items())]


def _error_against_length(key: str, metric: str, checks: Sequence[Check]) -> Figure:
    series = [
        Series(
            f"{name}; limit {_range([c.limit for c in group if c.limit])}" if any(c.limit for c in group) else name,
            [Point(c.seq_len or 0, c.value or 0.0, f"{c.case}: {number(c.value)}") for c in group],
            "marks",
            [Point(x, y) for x, y in sorted({(c.seq_len or 0, c.limit) for c in group if c.limit})],
        )
        for name, group in by_name(checks).items()
    ]
    worst = max(checks, key=lambda c: math.inf if c.value is None or not math.isfinite(c.value) else c.value)
    lengths = sorted({check.seq_len or 0 for check in checks})
    caption = (
        f"Largest: {number(worst.value)} in {worst.name} ({worst.case}), limit {number(worst.limit)}. "
        f"{len(checks)} comparisons at {len(lengths)} lengths."
    )
    title = f"Error against sequence length: {metric}"
    svg = scatter(key, title, caption, Axis("tokens", True, lengths), Axis(metric, True), series)
    return Figure(title, caption, svg, legend_of(series))


def _range(limits: Sequence[float]) -> str:
    """`2e-05`, or `1e-05 to 0.0002`."""
    return " to ".join(dict.fromkeys(number(limit) for limit in (min(limits), max(limits))))


def _error_per_layer(layers: Sequence[LayerError]) -> Figure:
    points = [
        Point(n, row.error, f"{row.layer} ({row.op_type}): {number(row.error)}")
        for n, row in enumerate(layers, start=1)
    ]
    worst = max(layers, key=lambda row: row.error if math.isfinite(row.error) else math.inf)
    caption = (
        f"Largest: {number(worst.error)} in {worst.layer} ({worst.op_type}). "
        f"{len(layers)} layers in the order of the model; the table below names them."
    )
    step = max(1, math.ceil(len(layers) / 12))
    ticks = list(range(1, len(layers) + 1, step))
    title = "Error per layer"
    y = Axis("relative error", True)
    return Figure(
        title, caption, scatter("layers", title, caption, Axis("layer", ticks=ticks), y, [Series(title, points)])
    )


def _histogram(key: str, name: str, checks: Sequence[Check]) -> Figure:
    counts = [sum(column) for column in zip(*(c.histogram for c in checks if c.histogram), strict=True)]
    labels = [power(edge) for edge in HISTOGRAM_EDGES]
    limit = min((c.limit for c in checks if c.limit and c.limit > 0), default=None)
    place = None if limit is None else math.log10(limit) - math.log10(HISTOGRAM_EDGES[0]) + 1
    total = sum(counts)
    high = max(n for n, count in enumerate(counts) if count)
    edge = f"below {labels[high]}" if high < len(labels) else f"of {labels[-1]} or more"
    caption = (
        f"{total:,} elements of all cases; the {counts[high]:,} with the largest errors are {edge}"
        + (f", the limit is {number(limit)}." if limit is not None else ".")
        + " The heights are logarithmic, to show the tail."
    )
    title = f"Histogram of errors: {name}"
    return Figure(title, caption, histogram(key, title, caption, "|error| / RMS", labels, counts, place))


def comparison_figures(comparison: Comparison) -> list[Figure]:
    """The errors, file sizes and build times of two reports side by side."""
    sides = (comparison.first, comparison.second)
    sizes = [{name: size / 1e6 for name, size in side.files.items()} for side in sides]
    times = [side.report.seconds for side in sides]
    figures = [
        _side_by_side("errors", "Worst error of each check", _UNIT, sides, [_errors(s, "worst") for s in sides]),
        _side_by_side("sizes", "Size of each file", "MB", sides, sizes),
        _side_by_side("times", "Time of each stage of the build", "seconds", sides, times),
    ]
    return [figure for figure in figures if figure]


def _errors(side: Side, field: str) -> dict[str, float]:
    """The worst value of each check that measures an error, or its limit."""
    entries = summary(side.report.checks).items()
    return {name: entry[field] for name, entry in entries if "RMS" in entry["metric"] and entry[field] is not None}


def _side_by_side(
    key: str, title: str, unit: str, sides: Sequence[Side], values: Sequence[Mapping[str, float]]
) -> Figure | None:
    """A row for each name with a value of at least one side; errors have limits, and a logarithmic axis."""
    names = list(dict.fromkeys(name for own in values for name in own))
    if not names:
        return None
    rows = {name: row for row, name in enumerate(names)}
    series = []
    for side, own in zip(sides, values, strict=True):
        limits = _errors(side, "limit") if unit == _UNIT else {}
        points = [Point(v, rows[name], f"{side.name}, {name}: {v:.3g} {unit}") for name, v in own.items()]
        bounds = [Point(limits[name], rows[name]) for name in own if limits.get(name)]
        series.append(Series(side.name, points, "marks", bounds))
    ticks = None if unit == _UNIT else ticks_from_zero(value for own in values for value in own.values())
    caption = "Upright bars are the limits of the marks in their colour." if unit == _UNIT else ""
    svg = dots(key, title, f"{title}. {caption}", Axis(unit, ticks is None, ticks), names, series)
    return Figure(title, caption, svg, legend_of(series))
