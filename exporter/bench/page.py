"""The folder of a benchmark: results.json, results.csv and report.html, a page with tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.bench.beside import Entry, mean_ratios, measured_sheet, sections
from effexport.bench.findings import (
    BASELINE,
    Curve,
    crossovers,
    curves,
    disturbance,
    headlines,
    interruption,
    median_ms,
    parity_sentence,
    problems,
    reason_of,
    status_of,
    verdict,
)
from effexport.bench.presets import TITLES
from effexport.bench.recommendation import on_frontier
from effexport.bench.results import BenchResults, Row
from effexport.files import FolderKind, csv_text
from effexport.proof.check import METRIC
from effexport.render.axes import PANEL_WIDTH, Axis, ticks_around, ticks_between
from effexport.render.multiples import Chart, Line, Quantity, chart_of
from effexport.render.svg import Figure, Point, Series, legend_of, scatter
from effexport.render.templates import template_environment
from effexport.units import NOTHING, duration, duration_with, listed, memory, moment, number, rate, three_digits, times

if TYPE_CHECKING:
    from effexport.bench.recommendation import Advice


@dataclass(frozen=True)
class Column:
    """A column of the table. numeric: aligned to the right. is_measured: empty for a row without a timing.

    below: the second line of a cell, where there is one.
    """

    title: str
    text: Callable[[Row], str]
    numeric: bool = True
    is_measured: bool = True
    below: Callable[[Row], str] = lambda row: ""


@dataclass(frozen=True)
class RowLine:
    """A row of the table. cells: those that describe the case and, if the row has a timing, the measured ones.

    reason: why it has no timing; "" if it has one.
    """

    name: str
    status: str
    cells: tuple[Entry, ...]
    reason: str


@dataclass(frozen=True)
class Table:
    """The table. columns: those after the name, in the order of the cells. groups: the rows of each length, by title.

    shared: values that all rows have, by the title of their column.
    """

    columns: tuple[Column, ...]
    groups: dict[str, list[RowLine]]
    shared: dict[str, str]

    @property
    def measured(self) -> int:
        """Number of measured columns, which are the last ones."""
        return sum(column.is_measured for column in self.columns)


def parity_text(row: Row) -> str:
    """`2.5e-06 of 0.0002`; the result in words if there is no number."""
    if row.parity is None:
        return NOTHING
    if row.parity.value is None:
        return row.parity.detail or ("passed" if row.parity.passed else "failed")
    return f"{number(row.parity.value)} of {number(row.parity.limit)}"


def implementation_text(row: Row) -> str:
    """`kernel` if all custom operators ran so, else what ran each of them."""
    ran = list(dict.fromkeys(row.implementation.values()))
    return ran[0] if len(ran) == 1 else ", ".join(f"{op}: {what}" for op, what in row.implementation.items()) or NOTHING


def options_text(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.case.options.items()) or NOTHING


def _median(row: Row) -> str:
    return NOTHING if row.timing is None else duration_with(row.timing.median_ms, row.timing.spread_ms)


def _rate(row: Row) -> str:
    return "" if row.timing is None else f"{rate(row.tokens_per_second)} tokens/s"


def _floor(row: Row) -> str:
    return "" if row.floor is None else f"floor {duration(row.floor.total_ms)}"


def _other_metric(row: Row) -> str:
    return "" if row.parity is None or row.parity.metric == METRIC else row.parity.metric


_CASE = (
    Column("Runtime", lambda row: row.case.runtime, False, False),
    Column("Scope", lambda row: row.case.scope, False, False),
    Column("Batch", lambda row: f"{row.case.batch:,}", True, False),
    Column("Precision", lambda row: row.case.precision, False, False),
    Column("Heads", lambda row: f"{row.case.heads} × {row.case.head_dim}", True, False),
)
_MEASURED = (
    Column("Median ± spread", _median, below=_rate),
    Column("× softmax", lambda row: three_digits(row.times_softmax)),
    Column("× torch", lambda row: three_digits(row.times_torch)),
    Column("× floor", lambda row: three_digits(row.times_floor), below=_floor),
    Column("Peak memory", lambda row: memory(row.peak_bytes)),
    Column("Parity", parity_text, below=_other_metric),
    Column("Ran as", implementation_text, False),
    Column("Runs", lambda row: NOTHING if row.timing is None else f"{row.timing.runs:,}"),
)
_SHARED_NAMES = ("Runtime", "Scope", "Batch", "Precision", "Heads", "Runs")


def table_of(rows: Sequence[Row]) -> Table:
    """All rows, grouped by length, in the order of the benchmark."""
    timed = [row for row in rows if row.is_quotable]
    shared: dict[str, str] = {}
    columns = []
    for column in (*_CASE, *_MEASURED):
        texts = {column.text(row) for row in (timed if column.is_measured else rows)}
        known = texts - {NOTHING}
        if len(known) == len(texts) == 1 and column.title in _SHARED_NAMES:
            shared[column.title] = known.pop()
        elif known:
            columns.append(column)
    lengths = sorted({row.case.seq_len for row in rows})
    groups = {
        f"{length:,} tokens": [_row_line(row, columns) for row in rows if row.case.seq_len == length]
        for length in lengths
    }
    return Table(tuple(columns), groups, shared)


def differing_options(rows: Iterable[Row]) -> dict[str, str]:
    """Options by model label, for models that have any."""
    return {row.case.label: options_text(row) for row in rows if row.case.options}


def _row_line(row: Row, columns: Sequence[Column]) -> RowLine:
    measured = row.is_quotable
    cells = tuple(
        Entry(column.text(row), column.below(row)) for column in columns if measured or not column.is_measured
    )
    return RowLine(row.case.label, status_of(row), cells, "" if measured else _reason(row))


def _reason(row: Row) -> str:
    """Why a row may not be quoted; for a disturbed row with its median, which is only an upper limit."""
    if row.status != "disturbed" or row.timing is None:
        return reason_of(row)
    return f"{reason_of(row)}; its median was {duration(row.timing.median_ms)}"


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


# A longer table is folded, so that the sections below it are easy to find.
MAX_OPEN_ROWS = 40


def html_from_results(results: BenchResults, advice: Advice | None = None) -> str:
    """The page of a benchmark, which may be incomplete; one of `bench --advise` begins with its advice."""
    environment = template_environment(
        ("render", "bench"),
        {"moment": moment, "memory": memory, "css": lambda text: text.replace(" ", "-")},
    )
    return environment.get_template("page.html.j2").render(
        results=results,
        advice=advice,
        frontier=None if advice is None else frontier_chart(advice),
        title=title_of(results),
        headlines=headlines(results),
        verdict=verdict(results),
        parity=parity_sentence(results),
        interruption=interruption(results),
        disturbance=disturbance(results),
        problems=problems(results),
        sections=sections(results),
        measured=measured_sheet(results),
        by_mean=mean_ratio_chart(results) if results.preset == "linear-blog" else None,
        speed=bench_chart(results),
        crossovers=crossovers(curves(results)),
        table=table_of(results.rows),
        is_open=len(results.rows) <= MAX_OPEN_ROWS,
        options=differing_options(results.rows),
        versions={name: text for name, text in results.environment.items() if name not in results.machine},
        has_floors=any(row.floor for row in results.rows),
        has_memory=any(row.peak_bytes is not None for row in results.rows),
    )


def title_of(results: BenchResults) -> str:
    """The published experiment that is repeated, else the models that are compared."""
    if results.preset:
        return f"Repeated: {TITLES.get(results.preset, results.preset)}"
    labels = list(dict.fromkeys(row.case.label for row in results.rows))
    if not labels or len(labels) > 6:
        return f"Attention benchmark of {len(labels)} models" if labels else "Attention benchmark"
    return f"Attention benchmark: {listed(labels)}"


JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
BENCH_FOLDER = FolderKind("a benchmark", JSON, b'{\n  "format_version": 1,\n  "rows": [')
_CASE_FIELDS = ["label", "variant", "options", "scope", "seq_len", "batch", "precision", "heads", "head_dim", "runtime"]
_TIMING = ["runs", "median_ms", "mean_ms", "deviation_ms", "lowest_ms", "highest_ms", "spread_ms"]
# Column of the CSV file (flat, with units in the names) → attribute of a row, in the order of the file.
COLUMNS: dict[str, str] = {
    **{name: f"case.{name}" for name in _CASE_FIELDS},
    **{name: name for name in ("implementation", "status", "reason")},
    **{f"parity_{name}": f"parity.{name}" for name in ("passed", "metric", "value", "limit")},
    **{name: f"timing.{name}" for name in _TIMING},
    **{name: name for name in ("tokens_per_second", "times_softmax", "times_torch")},
    **{f"floor_{name}": f"floor.{name}" for name in ("products_ms", "pass_ms")},
    "floor_ms": "floor.total_ms",
    **{name: name for name in ("times_floor", "peak_bytes", "note")},
    **{f"rounds_{name}": f"disturbance.{name}" for name in ("kept", "dropped")},
    **{name: f"disturbance.{name}" for name in ("waited_share", "own_cores", "other_cores", "stolen_cores")},
}


def write_results(
    results: BenchResults, output: Path, advice: Advice | None = None, *, force: bool
) -> tuple[Path, ...]:
    """Write all files or none; the page begins with the advice. Returns their paths. Raises as `FolderKind.new`."""
    texts = {JSON: results.to_json(), CSV: csv_from_results(results), PAGE: html_from_results(results, advice)}
    with BENCH_FOLDER.new(output, force=force) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return tuple(output / name for name in texts)


def csv_from_results(results: BenchResults) -> str:
    """The rows as CSV; the cell of a value that was not measured is empty."""
    return csv_text(COLUMNS, ([cell(row, path) for path in COLUMNS.values()] for row in results.rows))


def cell(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return " ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else value
