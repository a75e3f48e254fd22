"""One chart of several quantities in several places: small plots over the same lengths, with one legend for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from effexport.render.axes import PANEL_WIDTH, Axis, ticks_between
from effexport.render.svg import SERIES_COLOURS, Entry, Figure, Look, Point, Series, legend_of, scatter

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
