"""Measured figures next to published ones, in the published layout: one row per model, one column per length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from effexport.bench.findings import BASELINE, Curve, baseline_of, curves, has_several_batches, status_of
from effexport.bench.presets import Cell, Published, published_of
from effexport.bench.results import BenchResults, Row
from effexport.models.variants.nystrom.spec import NystromSpec
from effexport.units import NOTHING, duration_with, three_digits

# (row, softmax at the same length if that was timed) → the cell of measured figures
EntryOf = Callable[[Row, Row | None], "Entry"]


@dataclass(frozen=True)
class Entry:
    """A cell of a table. below: its second line, the ratio to softmax."""

    text: str
    below: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a table. begins: whether it starts a new group of lines."""

    name: str
    source: str
    entries: tuple[Entry, ...]
    begins: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table. lines: each with its source, if published and measured lines alternate. note: what its cells are."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    note: str = ""

    @property
    def has_sources(self) -> bool:
        return any(line.source for line in self.lines)


@dataclass(frozen=True)
class Section:
    """A publication, and its table if it has one."""

    published: Published
    sheet: Sheet | None


def sections(results: BenchResults) -> list[Section]:
    """The publications that the preset of a benchmark repeats."""
    if results.preset == "nystrom-table1":
        return [Section(published, _alternating(published, results)) for published in published_of(results.preset)]
    return [
        Section(published, _as_published(published) if published.rows else None)
        for published in published_of(results.preset)
    ]


def measured_sheet(results: BenchResults) -> Sheet | None:
    """All measured rows of a preset, in the layout of papers; None if they are shown among the published ones."""
    if results.preset == "nystrom-table1" or not published_of(results.preset):
        return None
    # means for the blog, which published means
    entry_of, note = (_mean_entry, _MEAN_NOTE) if results.preset == "linear-blog" else (_pair_entry, _PAIR_NOTE)
    columns, lines = _columns(results.rows), []
    found = _lines(curves(results), columns, entry_of)
    places = list(dict.fromkeys(curve.place for curve, _ in found))
    for place in places:
        here = [line for curve, line in found if curve.place == place]
        source = place if len(places) > 1 else ""
        lines += [replace(line, source=source, begins=n == 0) for n, line in enumerate(here)]
    return Sheet("Measured", _heads(columns), tuple(lines), note)


def mean_ratios(results: BenchResults) -> list[tuple[Curve, dict[int, float]]]:
    """Mean time of softmax divided by that of each other model, by length."""
    every = curves(results)
    ratios = []
    for curve in every:
        baseline = baseline_of(curve, every)
        if baseline:
            own, other = curve.values(_mean_ms), baseline.values(_mean_ms)
            ratios.append((curve, {length: other[length] / own[length] for length in own if length in other}))
    return [(curve, values) for curve, values in ratios if values]


def _mean_ms(row: Row) -> float | None:
    return None if row.timing is None else row.timing.mean_ms


_MEAN_NOTE = "Mean ± standard deviation of all runs; below, the mean of softmax divided by that of the model."
_PAIR_NOTE = (
    "Memory in MB / time in ms (median); below, how many times less memory and time than softmax in the same setting."
)


def _as_published(published: Published) -> Sheet:
    lines = [Line(str(row[0]), "", tuple(Entry(_cell_text(cell)) for cell in row[1:])) for row in published.rows]
    return Sheet("Published", published.columns[1:], tuple(lines))


def _alternating(published: Published, results: BenchResults) -> Sheet:
    """Every published row followed by the measured rows that repeat it; then the rows that repeat none."""
    # a measured length replaces the published one, whatever its batch
    columns = sorted(({int(length): 0 for length in published.columns[1:]} | dict(_columns(results.rows))).items())
    measured = _lines(curves(results), columns, _pair_entry)
    lines: list[Line] = []
    for row in published.rows:
        by_length = dict(zip(map(int, published.columns[1:]), row[1:], strict=True))
        baseline = dict(zip(map(int, published.columns[1:]), published.rows[0][1:], strict=True))
        entries = tuple(_published_entry(by_length.get(length), baseline.get(length)) for length, _ in columns)
        lines.append(Line(str(row[0]), "published", entries, True))
        lines += [line for curve, line in measured if _repeats(str(row[0]), curve)]
    names = [str(row[0]) for row in published.rows]
    others = [line for curve, line in measured if not any(_repeats(name, curve) for name in names)]
    lines += [replace(line, begins=n == 0) for n, line in enumerate(others)]
    return Sheet("Published and measured", _heads(columns), tuple(lines), _PAIR_NOTE)


def _repeats(name: str, curve: Curve) -> bool:
    """Whether a curve measures the model of a row of the Nyströmformer table: `Nyströmformer-64` has 64 landmarks."""
    if name == "Transformer":
        return curve.is_baseline
    model, _, landmarks = name.partition("-")
    case = curve.rows[0].case
    named = re.search(r"\d+$", case.label)
    given = case.options.get("num_landmarks", named[0] if named else NystromSpec.num_landmarks)
    return model == "Nyströmformer" and case.variant == "nystrom" and str(given) == landmarks


def _lines(every: Sequence[Curve], columns: Sequence[tuple[int, int]], entry_of: EntryOf) -> list[tuple[Curve, Line]]:
    lines = []
    for curve in every:
        baseline = baseline_of(curve, every)
        others = {row.case.seq_len: row for row in baseline.rows if row.is_quotable} if baseline else {}
        rows = {row.case.seq_len: row for row in curve.rows}
        entries = tuple(
            entry_of(rows[length], others.get(length)) if length in rows else Entry(NOTHING) for length, _ in columns
        )
        lines.append((curve, Line(curve.label, f"measured, {curve.place}", entries)))
    return lines


def _pair_entry(row: Row, softmax: Row | None) -> Entry:
    """`450 / 12.3`, and below `22.7 × / 12.6 ×`."""
    if not row.is_quotable or row.timing is None:
        return Entry(status_of(row))
    size = None if row.peak_bytes is None else row.peak_bytes / 1e6
    less = softmax.peak_bytes / row.peak_bytes if softmax and softmax.peak_bytes and row.peak_bytes else None
    faster = row.times_softmax if softmax or row.case.variant != BASELINE else None
    return Entry(_pair(size, row.timing.median_ms), _ratios(less, faster))


def _mean_entry(row: Row, softmax: Row | None) -> Entry:
    if not row.is_quotable or row.timing is None:
        return Entry(status_of(row))
    ratio = softmax.timing.mean_ms / row.timing.mean_ms if softmax and softmax.timing else None
    return Entry(
        duration_with(row.timing.mean_ms, row.timing.deviation_ms), "" if ratio is None else f"{three_digits(ratio)} ×"
    )


def _published_entry(cell: Cell, softmax: Cell) -> Entry:
    if not isinstance(cell, tuple) or not isinstance(softmax, tuple):
        return Entry(_cell_text(cell))
    return Entry(_cell_text(cell), "" if cell == softmax else _ratios(softmax[0] / cell[0], softmax[1] / cell[1]))


def _pair(size: float | None, time: float) -> str:
    return f"{three_digits(size)} / {three_digits(time)}"


def _ratios(less: float | None, faster: float | None) -> str:
    if less is None and faster is None:
        return ""
    return " / ".join(NOTHING if ratio is None else f"{three_digits(ratio)} ×" for ratio in (less, faster))


def _cell_text(cell: Cell) -> str:
    """A published cell with its original digits."""
    if cell is None:
        return NOTHING
    if isinstance(cell, tuple):
        return " / ".join(map(str, cell))
    return str(cell)


def _columns(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Length and batch of each column; batch 0 if batches differ at one length and are named by the curves."""
    if has_several_batches(rows):
        return sorted({(row.case.seq_len, 0) for row in rows})
    return sorted({(row.case.seq_len, row.case.batch) for row in rows})


def _heads(columns: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """`1,024`, or `1,024 × 16` with the batch where it changes with the length."""
    varies = len({batch for _, batch in columns if batch}) > 1
    return tuple(f"{length:,} × {batch}" if varies and batch else f"{length:,}" for length, batch in columns)
