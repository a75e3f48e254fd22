"""Plots as SVG text: pure functions without a library or external fonts.

Colours are classes, which the page sets for light and dark: `s0` to `s5` for series, `baseline`, `limit`. Series also
differ in their marks and dashes, so colour is never the only distinction. Every plot has a title and a description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from effexport.plots.axes import (
    LEFT,
    PLOT_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Scale,
    scale_of,
    short,
    text_at,
    x_axis,
    y_axis,
)

LEGEND_ROW = 20
SERIES_COLOURS = 6
# seven marks and six colours: 42 series look different
MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
    lambda x, y: f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 5.2:.1f}l5.2 5.2-5.2 5.2-5.2-5.2z"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
    lambda x, y: f'<path d="M{x:.1f} {y + 5:.1f}l5-9h-10z"/>',
    lambda x, y: f'<path d="M{x - 1.5:.1f} {y - 5:.1f}h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z"/>',
    lambda x, y: f'<path d="M{x - 2.2:.1f} {y - 5:.1f}h4.4v10h-4.4z"/>',
)
DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4", "9 3 2 3 2 3")


@dataclass(frozen=True)
class Figure:
    """A plot as SVG text, with its heading and a caption that says what to see in it."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Point:
    """A point. label: its tooltip."""

    x: float
    y: float
    label: str = ""


@dataclass(frozen=True)
class Look:
    """The look of a series: the numbers of its colour and its dashes, counted from 0; a baseline has colour -1."""

    colour: int
    dash: int


@dataclass(frozen=True)
class Series:
    """Points of a plot that belong together; without a name, they have no line in the legend.

    kind: "marks" are not joined; a "baseline" is compared with the others; a "limit" must not be exceeded; a "floor" is
    a thin line without marks. look: None for the next free one.
    """

    name: str
    points: Sequence[Point]
    kind: Literal["marks", "line", "baseline", "limit", "floor"] = "line"
    look: Look | None = None


def scatter(key: str, title: str, description: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Series over two axes. key: unique on the page. Values that are not finite are crosses at the upper edge."""
    points = [point for one in series for point in one.points]
    across = scale_of([p.x for p in points], x, LEFT + 14, WIDTH - RIGHT - 14)
    has_zero = y.logarithmic and any(p.y <= 0 for p in points)
    up = scale_of([p.y for p in points], y, TOP + PLOT_HEIGHT, TOP, has_zero)
    body = [*y_axis(y, up, has_zero), *x_axis(x, across)]
    # limits first, so that they hide nothing
    order = sorted(range(len(series)), key=lambda n: series[n].kind not in ("limit", "floor"))
    looks = _looks(series)
    for n in order:
        body += _drawn(series[n], looks[n], across, up)
    top = TOP + PLOT_HEIGHT + 62
    named = [n for n, one in enumerate(series) if one.name]
    rows = len(named)
    body += [part for row, n in enumerate(named) for part in _legend_row(series[n], looks[n], top + row * LEGEND_ROW)]
    if not all(math.isfinite(p.y) for p in points):
        y_of_row = top + rows * LEGEND_ROW
        body += [_cross(LEFT + 14, y_of_row), text_at(LEFT + 34, y_of_row + 4, "NaN or infinite")]
        rows += 1
    return _svg(key, title, description, top + rows * LEGEND_ROW - 6, body)


def histogram(
    key: str, title: str, description: str, x: str, labels: Sequence[str], counts: Sequence[int], limit: float | None
) -> str:
    """Bars over the decades between `labels`, one bar more than labels; heights are logarithmic, to show the tail.

    limit: where the limit lies, counted in labels from the left edge: 2.5 is between the second and the third label.
    """
    up = Scale(0.5, max(10, *counts), TOP + PLOT_HEIGHT, TOP + 14, True)
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    body, said = list(y_axis(Axis("elements", True), up, False, "whole")), []
    for n, count in enumerate(counts):
        left, top = LEFT + n * width, up(count)
        if count:
            height = TOP + PLOT_HEIGHT - top
            bar = f'<rect x="{left + 3:.1f}" y="{top:.1f}" width="{width - 6:.1f}" height="{height:.1f}"/>'
            body.append(f'<g class="s0">{bar}</g>')
            said.append(text_at(left + width / 2, top - 5, short(count), "middle"))
        if n < len(labels):
            said.append(text_at(left + width, TOP + PLOT_HEIGHT + 18, labels[n], "middle"))
    if limit is not None:
        place = LEFT + min(max(limit, 0), len(counts)) * width
        line = f'd="M{place:.1f} {TOP - 6}V{TOP + PLOT_HEIGHT}"/>'
        # a border in the colour of the page, to show the line on top of bars
        body.append(f'<path class="halo" {line}<path class="limit" {line}')
        anchor = "end" if place > WIDTH / 2 else "start"
        said.append(text_at(place + (-6 if anchor == "end" else 6), TOP - 10, "limit", anchor))
    # labels last, so that no line hides them
    body += said
    body.append(text_at((LEFT + WIDTH - RIGHT) / 2, TOP + PLOT_HEIGHT + 40, x, "middle"))
    return _svg(key, title, description, TOP + PLOT_HEIGHT + 50, body)


def _svg(key: str, title: str, description: str, height: float, body: Iterable[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height:.0f}" aria-labelledby="{escape(key)}-title {escape(key)}-desc">'
        f'<title id="{escape(key)}-title">{escape(title)}</title>'
        f'<desc id="{escape(key)}-desc">{escape(description)}</desc>{"".join(body)}</svg>'
    )


def _looks(series: Sequence[Series]) -> list[Look]:
    """The look of each series. Limits and baselines have fixed colours."""
    looks, free = [], 0
    for one in series:
        looks.append(one.look or Look(free, 2 if one.kind == "baseline" else free // SERIES_COLOURS))
        free += one.kind in ("marks", "line")
    return looks


def _drawn(series: Series, look: Look, across: Scale, up: Scale) -> list[str]:
    if series.kind == "limit":
        dashes = "".join(f"M{across(p.x) - 10:.1f} {up(p.y):.1f}h20" for p in series.points)
        return [f'<path class="limit" d="{dashes}"/>']
    parts = []
    finite = [p for p in series.points if math.isfinite(p.y)]
    if series.kind != "marks" and len(finite) > 1:
        path = "M" + "L".join(f"{across(p.x):.1f} {up(p.y):.1f}" for p in finite)
        parts.append(_line(series, look, path))
    for point in series.points if series.kind != "floor" else ():
        label = f"<title>{escape(point.label)}</title>" if point.label else ""
        if math.isfinite(point.y):
            mark = _mark(series, look, across(point.x), up(point.y))
        else:
            mark = _cross(across(point.x), TOP)
        parts.append(f"<g>{label}{mark}</g>")
    return [f'<g class="{_class(series, look)}">{"".join(parts)}</g>']


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10"/>'


def _legend_row(series: Series, look: Look, y: float) -> list[str]:
    x = LEFT + 14.0
    if series.kind == "limit":
        sign = f'<path class="limit" d="M{x - 10} {y}h20"/>'
    else:
        line = _line(series, look, f"M{x - 14} {y}h28") if series.kind != "marks" else ""
        mark = _mark(series, look, x, y) if series.kind != "floor" else ""
        sign = f'<g class="{_class(series, look)}">{line}{mark}</g>'
    return [sign, text_at(x + 22, y + 4, series.name)]


def _mark(series: Series, look: Look, x: float, y: float) -> str:
    """A mark; that of a baseline is a ring."""
    if series.kind == "baseline":
        return f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return MARKS[look.colour % len(MARKS)](x, y)


def _line(series: Series, look: Look, path: str) -> str:
    pattern = "1 3" if series.kind == "floor" else DASHES[look.dash % len(DASHES)]
    dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
    return f'<path class="{"thin" if series.kind == "floor" else "line"}" d="{path}"{dashes}/>'


def _class(series: Series, look: Look) -> str:
    return "baseline" if series.kind == "baseline" or look.colour < 0 else f"s{look.colour % SERIES_COLOURS}"
