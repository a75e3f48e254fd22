"""A result as a document: its verdict, sentences, tables and charts, from which every format is made.

`formats.py` renders it, so what the formats say of one result agrees. A chart of several quantities in several places
is a row of small plots over the same lengths, with one legend for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from effexport.base.formatting import NOTHING
from effexport.render.svg import (
    PANEL_WIDTH,
    SERIES_COLOURS,
    Axis,
    Entry,
    Figure,
    Look,
    Point,
    Series,
    legend_of,
    scatter,
    ticks_between,
)

# The values that a description lists from each end, if there are many.
LISTED = 4


@dataclass(frozen=True)
class Quantity:
    """A quantity to plot. axis: its unit. text: a value in words."""

    title: str
    axis: str
    text: Callable[[float], str]


@dataclass(frozen=True)
class PlotLine:
    """The values of one model in one place, such as a runtime, by length; and their limits, if there are any."""

    label: str
    place: str
    values: Mapping[int, float]
    limits: Mapping[int, float] = field(default_factory=dict)
    is_baseline: bool = False


@dataclass(frozen=True)
class Chart:
    """Small plots with one legend. rows: by title, the panels beside each other."""

    legend: tuple[Entry, ...]
    rows: dict[str, list[Figure]]


def chart_of(key: str, lines: Mapping[Quantity, Sequence[PlotLine]]) -> Chart | None:
    """A row for each quantity and a panel for each place; a single row if there is one place. None without values.

    A model has the same colour and mark everywhere, and all panels of a row have the same axes.
    """
    known = {quantity: [line for line in found if line.values] for quantity, found in lines.items()}
    every = [line for found in known.values() for line in found]
    labels = list(dict.fromkeys(line.label for line in every if not line.is_baseline))
    looks = {label: Look(n, n // SERIES_COLOURS) for n, label in enumerate(labels)}
    # with limits, if the model has any in one of the rows
    named = {line.label: line for line in sorted(every, key=lambda line: bool(line.limits))}
    baselines = [label for label in named if label not in looks]
    series = [_series(named[label], looks) for label in [*baselines, *labels]]
    places = list(dict.fromkeys(line.place for line in every))
    rows: dict[str, list[Figure]] = {}
    for n, (quantity, found) in enumerate(known.items()):
        for m, place in enumerate(places):
            here = [line for line in found if line.place == place]
            if here:
                title, heading = (quantity.title, place) if len(places) > 1 else ("", quantity.title)
                panel = _panel(f"{key}-{n}-{m}", heading, quantity, here, found, looks)
                rows.setdefault(title, []).append(panel)
    return Chart(legend_of(series), rows) if rows else None


def _panel(
    key: str,
    heading: str,
    quantity: Quantity,
    here: Sequence[PlotLine],
    row: Sequence[PlotLine],
    looks: Mapping[str, Look],
) -> Figure:
    lengths = sorted({length for line in row for length in line.values})
    y = Axis(
        quantity.axis, True, ticks_between(v for line in row for v in (*line.values.values(), *line.limits.values()))
    )
    title = f"{quantity.title}, {here[0].place}" if here[0].place else quantity.title
    series = [_series(line, looks, quantity.text) for line in here]
    caption = _ends(quantity, here)
    svg = scatter(key, title, caption, Axis("tokens", True, lengths), y, series, PANEL_WIDTH)
    return Figure(heading, caption, svg)


def _series(line: PlotLine, looks: Mapping[str, Look], text: Callable[[float], str] = str) -> Series:
    points = [
        Point(n, value, f"{line.label}, {line.place}, {n:,} tokens: {text(value)}") for n, value in line.values.items()
    ]
    limits = [Point(length, limit) for length, limit in line.limits.items()]
    if line.is_baseline:
        return Series(line.label, points, "baseline", limits, Look(-1, 2))
    return Series(line.label, points, "line", limits, looks[line.label])


def _ends(quantity: Quantity, lines: Sequence[PlotLine]) -> str:
    """The values at the longest length, smallest first; only the first and last if there are many."""
    longest = max(length for line in lines for length in line.values)
    known = sorted((line.values[longest], line.label) for line in lines if longest in line.values)
    texts = [f"{label} {quantity.text(value)}" for value, label in known]
    if len(texts) > 2 * LISTED:
        texts = [*texts[:LISTED], "…", *texts[-LISTED:]]
    return f"At {longest:,} tokens: {'; '.join(texts)}."


# Status of a sentence, a line or a cell → CSS class, style on a terminal, sign in Markdown. Other statuses are plain.
STATUSES: dict[str, tuple[str, str, str]] = {
    "passed": ("passed", "green", "✅"),
    "finished": ("passed", "green", "✅"),
    "failed": ("failed", "bold red", "❌"),
    "not run": ("not-run", "yellow", "⚠️"),
    "disturbed": ("disturbed", "yellow", "⚠️"),
    "not applicable": ("not-applicable", "dim", "➖"),
}


@dataclass(frozen=True)
class Sentence:
    """A sentence, coloured by its status."""

    text: str
    status: str = ""


@dataclass(frozen=True)
class Link:
    """The text of a cell that leads to a file beside the page."""

    text: str
    target: str


@dataclass(frozen=True)
class Column:
    """A column of a table. right: aligned to the right, like figures. is_status: coloured by its texts.

    below: on a page, its texts are below those of the column before it, in this form, such as `of {}`.
    group: on a page, its texts head groups of lines, in this form. Other formats show all columns side by side.
    """

    title: str
    right: bool = False
    is_status: bool = False
    below: str = ""
    group: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a table. With fewer cells than columns, status and reason take the place of the others.

    brief: what formats without room for a reason say, if not the status. begins: a group of lines begins here.
    """

    cells: tuple[str | Link, ...]
    status: str = ""
    reason: str = ""
    brief: str = ""
    begins: bool = False


# A column, and its text in a row.
TextColumn = tuple[Column, Callable[[Any], str | Link]]


@dataclass(frozen=True)
class Table:
    """A table. note: what its cells are. folded: the title under which a page folds it; is_open: unfolded at first."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    note: str = ""
    folded: str = ""
    is_open: bool = True

    @property
    def shown(self) -> list[tuple[int, list[int]]]:
        """The numbers of the columns that a page shows side by side, each with those below it."""
        found: list[tuple[int, list[int]]] = []
        for n, column in enumerate(self.columns):
            if column.below:
                found[-1][1].append(n)
            elif not column.group:
                found.append((n, []))
        return found

    @property
    def groups(self) -> list[tuple[str, list[Line]]]:
        """The lines by the headings of their groups; one group without a heading if no column heads groups."""
        at = next((n for n, column in enumerate(self.columns) if column.group), None)
        if at is None:
            return [("", list(self.lines))]
        found = groupby(self.lines, key=lambda line: self.columns[at].group.format(text_of(line.cells[at])))
        return [(heading, list(lines)) for heading, lines in found]

    def texts(self, line: Line) -> list[str]:
        """All cells of a line as plain text: its status, in short, in place of the first missing one."""
        known = [text_of(cell) for cell in line.cells]
        return (known + [line.brief or line.status] + [NOTHING] * len(self.columns))[: len(self.columns)]


@dataclass(frozen=True)
class Facts:
    """Names and values. is_prose: the values are paragraphs."""

    title: str
    rows: tuple[tuple[str, str], ...]
    is_prose: bool = False


@dataclass(frozen=True)
class Item:
    """Something that needs attention: what, why, and how to repeat it. log: the end of its log."""

    status: str
    text: str
    reason: str = ""
    log: str = ""
    command: str = ""


@dataclass(frozen=True)
class Code:
    """A command, to be copied."""

    text: str


@dataclass(frozen=True)
class Plots:
    """Plots beside each other, each with its own legend; on a page only."""

    figures: tuple[Figure, ...]


Part = str | Sentence | Table | Facts | Item | Code | Chart | Plots


@dataclass(frozen=True)
class Section:
    """Parts under a heading. is_background: a terminal leaves it out, and Markdown folds it."""

    title: str
    parts: tuple[Part, ...]
    is_background: bool = False

    @property
    def key(self) -> str:
        return "-".join("".join(letter if letter.isalnum() else " " for letter in self.title.lower()).split())


@dataclass(frozen=True)
class Document:
    """A result. program: the command that made it. lead: its conditions. created: when, in ISO format.

    verdicts: the conclusion, after warnings that limit it. parts: what belongs to the conclusion. sections without
    parts are left out.
    """

    program: str
    title: str
    verdicts: tuple[Sentence, ...]
    sections: tuple[Section, ...]
    lead: str = ""
    created: str = ""
    sentences: tuple[Sentence, ...] = ()
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(section for section in self.sections if section.parts))

    @property
    def tables(self) -> Iterator[Table]:
        for parts in (self.parts, *(section.parts for section in self.sections)):
            yield from (part for part in parts if isinstance(part, Table))


def text_of(cell: str | Link) -> str:
    return cell.target if isinstance(cell, Link) else cell


def present(*parts: Part | None) -> tuple[Part, ...]:
    """The parts that there are: no empty text, table or facts."""
    return tuple(part for part in parts if part and getattr(part, "lines", True) and getattr(part, "rows", True))


def columns_and_lines(
    own: Sequence[TextColumn],
    others: Sequence[TextColumn],
    status: str,
    rows: Iterable[Any],
    problem_of: Callable[[Any], Line | None],
) -> tuple[tuple[Column, ...], tuple[Line, ...]]:
    """The columns and lines of a table of rows; columns that are empty in all rows are left out.

    problem_of: a line without cells for a row whose reason takes the place of the other columns; None for others.
    status: the title of the only other column if all rows have problems.
    """
    lines = []
    for row in rows:
        problem = problem_of(row)
        cells = tuple(text(row) for _, text in (*own, *(() if problem else others)))
        lines.append(replace(problem, cells=cells) if problem else Line(cells))
    columns = [column for column, _ in (*own, *others)]
    kept = [
        n
        for n in range(len(columns))
        if any(len(line.cells) > n and text_of(line.cells[n]) not in ("", NOTHING) for line in lines)
    ]
    shown = [columns[n] for n in kept] + [Column(status)] * all(line.status for line in lines)
    return tuple(shown), tuple(
        replace(line, cells=tuple(line.cells[n] for n in kept if n < len(line.cells))) for line in lines
    )
