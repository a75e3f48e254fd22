"""Plots as SVG text: pure functions, no library, no fonts from elsewhere.

Colours are classes, which the page sets for light and dark: `s0` to `s5` for series, `yardstick`, `limit`. Series also
differ in their marks and dashes, so that nothing rests on colour alone. Every plot has a title and a description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

# Small enough to be read on a telephone, where a plot is scaled down to its width.
WIDTH = 520
LEFT, RIGHT, TOP, PLOT_HEIGHT = 58, 12, 26, 200
LEGEND_ROW = 20
SERIES_COLOURS = 6
# Labels of an axis that come closer than this, in pixels, run into each other.
MIN_GAP = 44
MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
    lambda x, y: f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 5.2:.1f}l5.2 5.2-5.2 5.2-5.2-5.2z"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
)
DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Point:
    """label: what a pointer that rests on it reads."""

    x: float
    y: float
    label: str = ""


@dataclass(frozen=True)
class Series:
    """kind: "marks" are not joined; a "yardstick" is what the others are compared with; a "limit" may not be passed."""

    name: str
    points: Sequence[Point]
    kind: Literal["marks", "line", "yardstick", "limit"] = "line"


@dataclass(frozen=True)
class Axis:
    """ticks: where there is something to read; None for the powers of ten of a logarithmic axis."""

    title: str
    logarithmic: bool = False
    ticks: Sequence[float] | None = None


@dataclass(frozen=True)
class Scale:
    """Data to pixels. low and high: the data's ends; values of 0 and below lie on the low end of a logarithmic one."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            low, high = math.log10(self.low), math.log10(self.high)
            place = math.log10(min(max(value, self.low), self.high))
        else:
            low, high, place = self.low, self.high, min(max(value, self.low), self.high)
        share = (place - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def scatter(key: str, title: str, description: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Series over two axes. key: unique on the page. Values that are not finite are crosses at the upper edge."""
    points = [point for one in series for point in one.points]
    across = _scale([p.x for p in points], x, LEFT + 14, WIDTH - RIGHT - 14)
    has_zero = y.logarithmic and any(p.y <= 0 for p in points)
    up = _scale([p.y for p in points], y, TOP + PLOT_HEIGHT, TOP, has_zero)
    body = [*_y_axis(y, up, has_zero), *_x_axis(x, across)]
    # limits first: nothing may be hidden by them
    order = sorted(range(len(series)), key=lambda n: series[n].kind != "limit")
    colours = _numbered(series)
    for n in order:
        body += _drawn(series[n], colours[n], across, up)
    top, rows = TOP + PLOT_HEIGHT + 62, len(series)
    body += [part for n, one in enumerate(series) for part in _legend_row(one, colours[n], top + n * LEGEND_ROW)]
    if not all(math.isfinite(p.y) for p in points):
        y_of_row = top + rows * LEGEND_ROW
        body += [_cross(LEFT + 14, y_of_row), _text(LEFT + 34, y_of_row + 4, "NaN or infinite")]
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
    body, said = list(_y_axis(Axis("elements", True), up, False, "whole")), []
    for n, count in enumerate(counts):
        left, top = LEFT + n * width, up(count)
        if count:
            height = TOP + PLOT_HEIGHT - top
            bar = f'<rect x="{left + 3:.1f}" y="{top:.1f}" width="{width - 6:.1f}" height="{height:.1f}"/>'
            body.append(f'<g class="s0">{bar}</g>')
            said.append(_text(left + width / 2, top - 5, _short(count), "middle"))
        if n < len(labels):
            said.append(_text(left + width, TOP + PLOT_HEIGHT + 18, labels[n], "middle"))
    if limit is not None:
        place = LEFT + min(max(limit, 0), len(counts)) * width
        line = f'd="M{place:.1f} {TOP - 6}V{TOP + PLOT_HEIGHT}"/>'
        # a border of the colour of the page, for where it crosses a bar
        body.append(f'<path class="halo" {line}<path class="limit" {line}')
        anchor = "end" if place > WIDTH / 2 else "start"
        said.append(_text(place + (-6 if anchor == "end" else 6), TOP - 10, "limit", anchor))
    # labels last: a line that crosses one does not hide it
    body += said
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, TOP + PLOT_HEIGHT + 40, x, "middle"))
    return _svg(key, title, description, TOP + PLOT_HEIGHT + 50, body)


def _svg(key: str, title: str, description: str, height: float, body: Iterable[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height:.0f}" aria-labelledby="{escape(key)}-title {escape(key)}-desc">'
        f'<title id="{escape(key)}-title">{escape(title)}</title>'
        f'<desc id="{escape(key)}-desc">{escape(description)}</desc>{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _numbered(series: Sequence[Series]) -> list[int]:
    """A number for each series that has a colour of its own; limits and yardsticks have theirs."""
    numbers, free = [], 0
    for one in series:
        numbers.append(free)
        free += one.kind in ("marks", "line")
    return numbers


def _scale(values: Iterable[float], axis: Axis, start: float, end: float, has_zero: bool = False) -> Scale:
    """has_zero: leave the lowest decade of a logarithmic axis to 0."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.logarithmic)]
    if axis.ticks is not None:
        known += axis.ticks
    low, high = min(known, default=1.0), max(known, default=10.0)
    if axis.logarithmic and axis.ticks is None:
        # whole decades, one at least
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        high = max(high, 10 * low)
        low = low / 10 if has_zero else low
    return Scale(low, high, start, end, axis.logarithmic)


def _ticks(axis: Axis, scale: Scale) -> list[float]:
    """As the axis says; else powers of ten, or the ends of an axis that is not logarithmic."""
    if axis.ticks is not None:
        return list(axis.ticks)
    if not scale.logarithmic:
        return [scale.low, scale.high] if scale.high > scale.low else [scale.low]
    first, last = math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high))
    step = max(1, math.ceil((last - first + 1) / 8))
    return [10.0**power for power in range(first, last + 1, step)]


def _y_axis(axis: Axis, scale: Scale, has_zero: bool, style: Literal["power", "whole"] = "power") -> list[str]:
    parts = []
    for tick in _ticks(axis, scale):
        y = scale(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        if has_zero and tick <= scale.low:
            continue
        label = _short(tick) if style == "whole" else _figure(tick)
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
    if has_zero:
        parts.append(_text(LEFT - 8, scale.start + 4, "0", "end"))
    parts.append(_text(4, 12, axis.title))
    return parts


def _x_axis(axis: Axis, scale: Scale) -> list[str]:
    bottom = TOP + PLOT_HEIGHT
    parts = [f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>']
    ticks = _ticks(axis, scale)
    labelled = _with_room([scale(tick) for tick in ticks])
    for n, tick in enumerate(ticks):
        x = scale(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
        if n in labelled:
            parts.append(_text(x, bottom + 20, _figure(tick), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, axis.title, "middle"))
    return parts


def _with_room(places: Sequence[float]) -> set[int]:
    """Which labels of an axis fit beside each other: the last, the first, and what is between as there is room."""
    chosen: list[int] = []
    for n in (len(places) - 1, *range(len(places) - 1)):
        if all(abs(places[n] - places[other]) >= MIN_GAP for other in chosen):
            chosen.append(n)
    return set(chosen)


def _drawn(series: Series, number: int, across: Scale, up: Scale) -> list[str]:
    if series.kind == "limit":
        dashes = "".join(f"M{across(p.x) - 10:.1f} {up(p.y):.1f}h20" for p in series.points)
        return [f'<path class="limit" d="{dashes}"/>']
    parts = []
    finite = [p for p in series.points if math.isfinite(p.y)]
    if series.kind != "marks" and len(finite) > 1:
        path = "M" + "L".join(f"{across(p.x):.1f} {up(p.y):.1f}" for p in finite)
        parts.append(f'<path class="line" d="{path}"{_dash(series, number)}/>')
    for point in series.points:
        label = f"<title>{escape(point.label)}</title>" if point.label else ""
        if math.isfinite(point.y):
            mark = MARKS[number % len(MARKS)](across(point.x), up(point.y))
        else:
            mark = _cross(across(point.x), TOP)
        parts.append(f"<g>{label}{mark}</g>")
    return [f'<g class="{_class(series, number)}">{"".join(parts)}</g>']


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10"/>'


def _legend_row(series: Series, number: int, y: float) -> list[str]:
    x = LEFT + 14.0
    if series.kind == "limit":
        sign = f'<path class="limit" d="M{x - 10} {y}h20"/>'
    else:
        line = f'<path class="line" d="M{x - 12} {y}h24"{_dash(series, number)}/>' if series.kind != "marks" else ""
        sign = f'<g class="{_class(series, number)}">{line}{MARKS[number % len(MARKS)](x, y)}</g>'
    return [sign, _text(x + 20, y + 4, series.name)]


def _class(series: Series, number: int) -> str:
    return "yardstick" if series.kind == "yardstick" else f"s{number % SERIES_COLOURS}"


def _dash(series: Series, number: int) -> str:
    pattern = "2 4" if series.kind == "yardstick" else DASHES[number // SERIES_COLOURS % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _figure(value: float) -> str:
    """As in the tables, but 1e-6 rather than 1.0e-06, and 8192 in full."""
    return power(value) if 0 < abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:g}"


def power(value: float) -> str:
    """1e-6 for a power of ten, 1 for 1."""
    exponent = round(math.log10(value))
    return f"1e{exponent}" if exponent else "1"


def _short(count: float) -> str:
    """12, 3.4k, 1.2M: a count in few characters."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"
