"""Published experiments to repeat, of published.toml, and the figures that were published beside measured ones.

A table has the published layout: one row per model, one column per length.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import msgspec

from effexport.base.formatting import NOTHING, duration_with, three_digits
from effexport.bench.findings import BASELINE, Curve, baseline_of, curves
from effexport.bench.grid import BenchResults, BenchRow, Grid
from effexport.models.variants.nystrom import NystromSpec
from effexport.render.document import Column, Line, Table


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published experiment to repeat. title: of its page."""

    name: str
    title: str
    grid: Grid
    rounds: int = 15
    max_seconds: float = 20.0


# A figure, a pair of memory in MB and time in ms, or words.
FigureCell = str | int | float | tuple[int | float, int | float] | None


@dataclass(frozen=True)
class Published:
    """A published table, or a claim without one, which has neither columns nor rows.

    columns: heads, that of the row's name first. rows: the name, then a cell for each further column. note: caveats for
    comparisons.
    """

    preset: str
    title: str
    source: str
    note: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[FigureCell, ...], ...] = ()


_FILE = tomllib.loads(files("effexport.bench").joinpath("published.toml").read_text(encoding="utf-8"))
PRESETS = {one.name: one for one in msgspec.convert(_FILE["preset"], tuple[Preset, ...])}
PUBLICATIONS = msgspec.convert(_FILE["published"], tuple[Published, ...])


def published_of(preset: str) -> tuple[Published, ...]:
    """The publications that a preset repeats; none for "" and for unknown names."""
    return tuple(one for one in PUBLICATIONS if one.preset == preset)


# Figures, and below them their ratios to softmax.
Pair = tuple[str, str]
# (row, softmax at the same length if that was timed) → its figures
PairOf = Callable[[BenchRow, BenchRow | None], Pair]
MEAN_NOTE = "Mean ± standard deviation of all runs; below, the mean of softmax divided by that of the model."
PAIR_NOTE = (
    "Memory in MB / time in ms (median); below, how many times less memory and time than softmax in the same setting."
)


def published_tables(results: BenchResults) -> list[tuple[Published, Table | None]]:
    """The publications that the preset of a benchmark repeats, and the table of those that have one."""
    if results.preset == "nystrom-table1":
        return [(one, alternating(one, results)) for one in published_of(results.preset)]
    return [(one, as_published(one) if one.rows else None) for one in published_of(results.preset)]


def measured_table(results: BenchResults) -> Table | None:
    """All measured rows of a preset, in the layout of papers; None if they are shown among the published ones."""
    if results.preset == "nystrom-table1" or not published_of(results.preset):
        return None
    # means for the blog, which published means
    pair_of, note = (mean_pair, MEAN_NOTE) if results.preset == "linear-blog" else (median_pair, PAIR_NOTE)
    lengths = lengths_of(results)
    found = measured_lines(curves(results), lengths, pair_of)
    where = list(dict.fromkeys(curve.place for curve, _ in found))
    lines = []
    for place in where:
        here = [one for one in found if one[0].place == place]
        lines += [line_of(curve.label, place, pairs, n == 0) for n, (curve, pairs) in enumerate(here)]
    return sheet("Measured", lengths, lines, note, "Where" if len(where) > 1 else "")


def mean_ratios(results: BenchResults) -> list[tuple[Curve, dict[int, float]]]:
    """Mean time of softmax divided by that of each other model, by length."""
    every = curves(results)
    pairs = [(curve, found.values(mean_ms)) for curve in every if (found := baseline_of(curve, every))]
    return [
        (curve, {length: other[length] / own for length, own in curve.values(mean_ms).items() if length in other})
        for curve, other in pairs
    ]


def mean_ms(row: BenchRow) -> float | None:
    return None if row.timing is None else row.timing.mean_ms


def as_published(published: Published) -> Table:
    columns = (Column("Model"), *(Column(title, True) for title in published.columns[1:]))
    return Table("Published", columns, tuple(Line(tuple(map(cell_text, row))) for row in published.rows))


def alternating(published: Published, results: BenchResults) -> Table:
    """Every published row followed by the measured rows that repeat it; then the rows that repeat none."""
    columns = [int(length) for length in published.columns[1:]]
    lengths = sorted({*columns, *lengths_of(results)})
    others = measured_lines(curves(results), lengths, median_pair)
    softmax = dict(zip(columns, published.rows[0][1:], strict=True))
    lines: list[Line] = []
    for row in published.rows:
        figures = dict(zip(columns, row[1:], strict=True))
        pairs = [published_pair(figures.get(length), softmax.get(length)) for length in lengths]
        lines.append(line_of(str(row[0]), "published", pairs, True))
        lines += [measured_line(curve, pairs) for curve, pairs in others if repeats(str(row[0]), curve)]
        others = [one for one in others if not repeats(str(row[0]), one[0])]
    lines += [measured_line(*one, begins=n == 0) for n, one in enumerate(others)]
    return sheet("Published and measured", lengths, lines, PAIR_NOTE, "Source")


def sheet(title: str, lengths: Sequence[int], lines: Sequence[Line], note: str, source: str) -> Table:
    """A table with two columns for each length. source: the title of the second column, "" to leave it out."""
    ratio = Column("× softmax", True, below="{}")
    pairs = [column for length in lengths for column in (Column(f"{length:,}", True), ratio)]
    columns = (Column("Model"), *[Column(source)] * bool(source), *pairs)
    if not source:
        lines = [replace(line, cells=line.cells[:1] + line.cells[2:]) for line in lines]
    return Table(title, columns, tuple(lines), note)


def line_of(name: str, source: str, pairs: Sequence[Pair], begins: bool = False) -> Line:
    return Line((name, source, *(text for pair in pairs for text in pair)), begins=begins)


def measured_line(curve: Curve, pairs: Sequence[Pair], begins: bool = False) -> Line:
    return line_of(curve.label, f"measured, {curve.place}", pairs, begins)


def repeats(name: str, curve: Curve) -> bool:
    """True if a curve measures the model of a row of the Nyströmformer table: `Nyströmformer-64` has 64 landmarks."""
    if name == "Transformer":
        return curve.is_baseline
    model, _, landmarks = name.partition("-")
    case = curve.rows[0].case
    given = case.options.get("num_landmarks", NystromSpec.num_landmarks)
    return model == "Nyströmformer" and case.variant == "nystrom" and str(given) == landmarks


def measured_lines(every: Sequence[Curve], lengths: Sequence[int], pair_of: PairOf) -> list[tuple[Curve, list[Pair]]]:
    """The figures of each curve at each length."""
    found = []
    for curve in every:
        baseline = baseline_of(curve, every)
        others = {row.case.seq_len: row for row in baseline.rows if row.is_quotable} if baseline else {}
        rows = {row.case.seq_len: row for row in curve.rows}
        pairs = [pair_of(rows[n], others.get(n)) if n in rows else (NOTHING, "") for n in lengths]
        found.append((curve, pairs))
    return found


def median_pair(row: BenchRow, softmax: BenchRow | None) -> Pair:
    """`450 / 12.3`, and below `22.7 × / 12.6 ×`."""
    if not row.is_quotable or row.timing is None:
        return row.status, ""
    size = None if row.peak_bytes is None else row.peak_bytes / 1e6
    less = softmax.peak_bytes / row.peak_bytes if softmax and softmax.peak_bytes and row.peak_bytes else None
    faster = row.times_softmax if softmax or row.case.variant != BASELINE else None
    return f"{three_digits(size)} / {three_digits(row.timing.median_ms)}", ratios_text(less, faster)


def mean_pair(row: BenchRow, softmax: BenchRow | None) -> Pair:
    if not row.is_quotable or row.timing is None:
        return row.status, ""
    ratio = softmax.timing.mean_ms / row.timing.mean_ms if softmax and softmax.timing else None
    below = "" if ratio is None else f"{three_digits(ratio)} ×"
    return duration_with(row.timing.mean_ms, row.timing.deviation_ms), below


def published_pair(cell: FigureCell, softmax: FigureCell) -> Pair:
    if not isinstance(cell, tuple) or not isinstance(softmax, tuple) or cell == softmax:
        return cell_text(cell), ""
    return cell_text(cell), ratios_text(softmax[0] / cell[0], softmax[1] / cell[1])


def ratios_text(less: float | None, faster: float | None) -> str:
    if less is None and faster is None:
        return ""
    return " / ".join(NOTHING if ratio is None else f"{three_digits(ratio)} ×" for ratio in (less, faster))


def cell_text(cell: FigureCell) -> str:
    """A published cell with its original digits."""
    if cell is None:
        return NOTHING
    return " / ".join(map(str, cell)) if isinstance(cell, tuple) else str(cell)


def lengths_of(results: BenchResults) -> list[int]:
    return sorted({row.case.seq_len for row in results.rows})
