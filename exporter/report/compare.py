"""Two reports side by side: what differs in what was built, and what that did to errors, sizes and times.

Also the plots of one report and of two: errors against length, per layer and as histograms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from effexport.base.dtypes import TensorInfo
from effexport.base.formatting import NOTHING, megabytes, number, seconds
from effexport.proof.check import HISTOGRAM_EDGES, Check, by_name, summary
from effexport.render.document import Column, Document, Line, Plots, Section, Sentence, Table
from effexport.render.svg import (
    Axis,
    Figure,
    Point,
    Series,
    dots,
    histogram,
    legend_of,
    power,
    scatter,
    ticks_from_zero,
)
from effexport.report.report import LayerError, Report, dict_of_check
from effexport.report.wording import field_text, flat_fields, quantization_facts, status_of


@dataclass(frozen=True)
class Side:
    """A report with the name of its artifact. files: bytes by name, without the report itself.

    inputs, outputs: those of model.onnx.
    """

    name: str
    report: Report
    files: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True)
class Row:
    """One figure of both; None is what one of them does not have. first and second are texts for people."""

    name: str
    first: str | None
    second: str | None

    @property
    def differs(self) -> bool:
        return self.first != self.second


@dataclass(frozen=True)
class CheckRow:
    """The worst of one kind of check, on both sides; None where a side has no such check."""

    name: str
    metric: str
    first: Mapping[str, Any] | None
    second: Mapping[str, Any] | None

    @property
    def ratio(self) -> float | None:
        """second / first; None if that is not meaningful."""
        values = [entry["worst"] if entry else None for entry in (self.first, self.second)]
        if None in values or not values[0]:
            return None
        ratio: float = values[1] / values[0]
        return ratio


@dataclass(frozen=True)
class Comparison:
    first: Side
    second: Side

    @property
    def spec(self) -> list[Row]:
        """The fields that differ."""
        first, second = (
            flat_fields(side.report.spec) | {"weights_from": side.report.weights_from}
            for side in (self.first, self.second)
        )
        return [row for row in _rows(first, second, field_text) if row.differs]

    @property
    def checks(self) -> list[CheckRow]:
        """Kind by kind."""
        first, second = summary(self.first.report.checks), summary(self.second.report.checks)
        return [
            CheckRow(name, (first.get(name) or second[name])["metric"], _judged(first, name), _judged(second, name))
            for name in {**first, **second}
        ]

    @property
    def cases(self) -> list[tuple[str, str, Check | None, Check | None]]:
        """Check by check: (name, case, first, second). Cases of equal name are one row, whatever their length."""
        sides = [
            {(check.name, check.case.name): check for check in side.report.checks} for side in (self.first, self.second)
        ]
        return [
            (name, case, sides[0].get((name, case)), sides[1].get((name, case))) for name, case in sides[0] | sides[1]
        ]

    @property
    def quantization(self) -> list[Row]:
        """Quantisation on both sides, and its cost; empty if neither is quantised."""
        first, second = (
            dict(quantization_facts(record)) if (record := side.report.quantization) else {}
            for side in (self.first, self.second)
        )
        return _rows(first, second, str)

    @property
    def files(self) -> list[Row]:
        return _rows(self.first.files, self.second.files, megabytes)

    @property
    def seconds(self) -> list[Row]:
        first, second = (
            {**side.report.seconds, "all stages": sum(side.report.seconds.values())}
            for side in (self.first, self.second)
        )
        return _rows(first, second, seconds)

    @property
    def environment(self) -> list[Row]:
        """Versions and machines that differ."""
        first, second = self.first.report.environment, self.second.report.environment
        return [row for row in _rows(first, second, lambda value: value or "not installed") if row.differs]

    def to_dict(self) -> dict[str, Any]:
        def pairs(rows: list[Row]) -> dict[str, Any]:
            return {row.name: [row.first, row.second] for row in rows}

        return {
            "artifacts": [side.name for side in (self.first, self.second)],
            "titles": [side.report.title for side in (self.first, self.second)],
            "verdicts": [side.report.verdict for side in (self.first, self.second)],
            "spec": pairs(self.spec),
            "quantization": pairs(self.quantization),
            "checks": {row.name: {"metric": row.metric, "results": [row.first, row.second]} for row in self.checks},
            "cases": [
                {"name": name, "case": case, "results": [dict_of_check(check) if check else None for check in both]}
                for name, case, *both in self.cases
            ],
            "bytes": _paired(self.first.files, self.second.files),
            "seconds": _paired(self.first.report.seconds, self.second.report.seconds),
            "environment": pairs(self.environment),
        }


def measured_text(value: float, limit: float | None) -> str:
    """`2.6e-06 of 0.0002`, or the value alone where there is no limit."""
    return number(value) if limit is None else f"{number(value)} of {number(limit)}"


def _judged(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    if name not in entries:
        return None
    return {"status": status_of(entries[name]), **entries[name]}


def _rows(first: Mapping[str, Any], second: Mapping[str, Any], text: Callable[[Any], str]) -> list[Row]:
    def said(values: Mapping[str, Any], name: str) -> str | None:
        return text(values[name]) if name in values else None

    return [Row(name, said(first, name), said(second, name)) for name in {**first, **second}]


def _paired(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [first.get(name), second.get(name)] for name in {**first, **second}}


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


OTHER_MODELS = "Different models, {} and {}: ratios compare how close each is to PyTorch, not how good it is."


def document_from_comparison(comparison: Comparison) -> Document:
    """The verdicts of both, and what differs in the spec, in checks, sizes, times and the environment."""
    sides = (comparison.first, comparison.second)
    names, titles = [side.name for side in sides], [side.report.title for side in sides]

    def pairs(title: str, rows: Sequence[Row], *, right: bool = False) -> Table:
        columns = (Column(title), *(Column(name, right) for name in names))
        return Table(title, columns, tuple(Line((r.name, r.first or NOTHING, r.second or NOTHING)) for r in rows))

    results = tuple(
        column for name in names for column in (Column(name, is_status=True), Column(f"{name}: of limit", below="{}"))
    )
    checks = tuple(
        Line((row.name, row.metric, ratio_text(row.ratio), *result_of(row.first), *result_of(row.second)))
        for row in comparison.checks
    )
    cases = tuple(
        Line((name, case, *case_of(first), *case_of(second))) for name, case, first, second in comparison.cases
    )
    columns = (Column("Check"), Column("Metric", below="{}"), Column("Ratio", right=True), *results)
    ratio = f"Ratio = {names[1]} ÷ {names[0]}."
    every = Table("Every case", (Column("Check"), Column("Case"), *results), cases, folded="Every case", is_open=False)
    figures = comparison_figures(comparison)
    same_spec, same_environment = "Both were built from the same spec.", "The same versions on the same platform."
    return Document(
        program="effexport report",
        title=f"Comparison of two artifacts: {names[0]} and {names[1]}",
        verdicts=tuple(
            Sentence(f"{s.name}, {s.report.title}, {s.report.spec['precision']}. {s.report.sentence}", s.report.verdict)
            for s in sides
        ),
        sentences=() if titles[0] == titles[1] else (Sentence(OTHER_MODELS.format(*titles)),),
        sections=(
            Section("Errors, sizes and times", (Plots(tuple(figures)),) if figures else ()),
            Section("Differences in the spec", (pairs("Field", comparison.spec) if comparison.spec else same_spec,)),
            Section(
                "Quantisation", (pairs("Quantisation", comparison.quantization),) if comparison.quantization else ()
            ),
            Section("Checks", (Table("Checks", columns, checks, note=ratio), every)),
            Section(
                "Sizes and times in figures",
                (
                    pairs("File", comparison.files, right=True),
                    pairs("Stage of the build", comparison.seconds, right=True),
                ),
            ),
            Section(
                "Differences in the environment",
                (pairs("Part", comparison.environment) if comparison.environment else same_environment,),
            ),
        ),
    )


def ratio_text(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"× {number(ratio)}"


def result_of(entry: Mapping[str, Any] | None) -> tuple[str, str]:
    """Result and `2.6e-06 of 0.0002` of a summary of checks."""
    if entry is None:
        return NOTHING, ""
    return entry["status"], "" if entry["worst"] is None else measured_text(entry["worst"], entry["limit"])


def case_of(check: Check | None) -> tuple[str, str]:
    """Result and `2.6e-06 of 0.0002 at 1 × 512` of one side's case."""
    if check is None:
        return NOTHING, ""
    value = "" if check.value is None else measured_text(check.value, check.limit)
    return check.status, f"{value} at {check.case.shape_text}".strip() if check.case.shape else value
