"""Plots as SVG text: pure functions without a library or external fonts; and their axes, which map data to pixels.

Colours are classes, which the page sets for light and dark: `s0` to `s5` for series, and `baseline`. Series also differ
in their marks and dashes, so colour is never the only distinction. Every plot has a title and a description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

# Readable on a phone, where a plot is scaled down to the width of the screen; several panels fit beside each other.
WIDTH, PANEL_WIDTH = 520, 320
LEFT, RIGHT, TOP, PLOT_HEIGHT = 58, 12, 26, 200
# Room for marks between the ends of a scale and those of its axis.
EDGE = 14
# Minimal distance of the labels of an axis, in pixels.
MIN_GAP = 44
# Labels within each power of ten, as close as there is room for.
MAX_TICKS = 8
STEPS = ((1, 2, 5), (1,))


@dataclass(frozen=True)
class Axis:
    """An axis. ticks: positions of labels, always within sight; None for the powers of ten of a logarithmic axis."""

    title: str
    logarithmic: bool = False
    ticks: Sequence[float] | None = None


@dataclass(frozen=True)
class Scale:
    """A mapping from data to pixels. low, high: range of the data; logarithmic axes put values ≤ 0 at the low end."""

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


def scale_of(values: Iterable[float], axis: Axis, start: float, end: float, has_zero: bool = False) -> Scale:
    """The scale of an axis. has_zero: reserve the lowest decade of a logarithmic axis for 0."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.logarithmic)]
    if axis.ticks is not None:
        known += axis.ticks
    low, high = min(known, default=1.0), max(known, default=10.0)
    if axis.logarithmic and axis.ticks is None:
        # whole decades, at least one, whose powers are ordinary numbers
        low, high = min(max(low, 1e-300), 1e299), max(min(high, 1e300), 1e-300)
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        high = max(high, 10 * low)
        low = low / 10 if has_zero else low
    return Scale(low, high, start, end, axis.logarithmic)


def _ticks(axis: Axis, scale: Scale) -> list[float]:
    """The ticks of the axis; by default powers of ten, or the two ends of a linear axis."""
    if axis.ticks is not None:
        return list(axis.ticks)
    if not scale.logarithmic:
        return [scale.low, scale.high] if scale.high > scale.low else [scale.low]
    first, last = math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high))
    step = max(1, math.ceil((last - first + 1) / 8))
    return [10.0**power for power in range(first, last + 1, step)]


def y_axis(
    axis: Axis, scale: Scale, has_zero: bool, right: float, label: Callable[[float], str] | None = None
) -> list[str]:
    """Lines from LEFT to `right`, with labels at their left; `label` is the text of a value."""
    parts = []
    for tick in _ticks(axis, scale):
        y = scale(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        if has_zero and tick <= scale.low:
            continue
        parts.append(text_at(LEFT - 8, y + 4, (label or _figure)(tick), "end"))
    if has_zero:
        parts.append(text_at(LEFT - 8, scale.start + 4, "0", "end"))
    parts.append(text_at(4, 13, axis.title))
    return parts


def x_axis(axis: Axis, scale: Scale, bottom: float, has_zero: bool = False) -> list[str]:
    """A line at `bottom`, a little longer than the scale, and labels below it."""
    parts = [f'<path class="axis" d="M{scale.start - EDGE:.1f} {bottom}H{scale.end + EDGE:.1f}"/>']
    ticks = _ticks(axis, scale)
    labelled = _with_room([scale(tick) for tick in ticks])
    for n, tick in enumerate(ticks):
        x = scale(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
        if n in labelled:
            label = "0" if has_zero and tick <= scale.low else _figure(tick)
            parts.append(text_at(x, bottom + 20, label, "middle"))
    parts.append(text_at((scale.start + scale.end) / 2, bottom + 40, axis.title, "middle"))
    return parts


def ticks_between(values: Iterable[float]) -> list[float]:
    """Labels of a logarithmic axis that just enclose all values, at most eight."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(known), max(known)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for steps in STEPS:
        every = [step * 10.0**power for power in powers for step in steps]
        start = max(n for n, tick in enumerate(every) if tick <= low)
        end = next(n for n, tick in enumerate(every) if tick >= high and n > start)
        if end - start < MAX_TICKS:
            return every[start : end + 1]
    stride = math.ceil((end - start) / (MAX_TICKS - 1))
    return [every[start] * 10.0 ** (stride * n) for n in range(math.ceil((end - start) / stride) + 1)]


def ticks_from_zero(values: Iterable[float]) -> list[float]:
    """Labels of a linear axis from 0 to at least the largest value, at most six."""
    high = max(values, default=0.0) or 1.0
    size = 10.0 ** math.floor(math.log10(high))
    step = next(step * size for step in (0.2, 0.5, 1, 2) if 5 * step * size >= high)
    return [float(f"{n * step:.6g}") for n in range(math.ceil(high / step) + 1)]


def ticks_around(values: Iterable[float]) -> list[float]:
    """Labels of a linear axis that enclose all values, at most seven."""
    known = list(values)
    low, high = min(known), max(known)
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span))
    step = next(step * size for step in (0.2, 0.5, 1, 2) if 5 * step * size >= span)
    return [float(f"{n * step:.6g}") for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _with_room(places: Sequence[float]) -> set[int]:
    """The labels that fit: the last, the first, and as many between them as there is room for."""
    chosen: list[int] = []
    for n in (len(places) - 1, *range(len(places) - 1)):
        if all(abs(places[n] - places[other]) >= MIN_GAP for other in chosen):
            chosen.append(n)
    return set(chosen)


def _figure(value: float) -> str:
    """A number as in the tables, but 2e-6 instead of 2.0e-06, and 8192 in full."""
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e9:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return short(value) if value >= 1e5 else f"{value:g}"


def power(value: float) -> str:
    """1e-6 for a power of ten, 1 for 1."""
    exponent = round(math.log10(value))
    return f"1e{exponent}" if exponent else "1"


def short(count: float) -> str:
    """12, 3.4k, 1.2M: a count in few characters."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


def text_at(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# Size of the sign of a series in a legend, and the middle of its line.
SIGN_WIDTH, SIGN_HEIGHT, SIGN_MIDDLE = 32, 16, 10
# Width of the bars that mark limits; marks and limits of several series at one place lie beside each other.
BAR, MAX_SPREAD = 10, 30
# Height of the name of a row of dots, and of the row.
ROW_NAME, ROW = 14, 40
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
class Entry:
    """A line of a legend. sign: SVG of SIGN_WIDTH × SIGN_HEIGHT pixels."""

    sign: str
    name: str


@dataclass(frozen=True)
class Figure:
    """A plot as SVG text, with its heading, a caption that says what to see in it, and its legend."""

    title: str
    caption: str
    svg: str
    legend: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Point:
    """A point. label: its tooltip. interval: from where to where y may be, drawn as a line; () if that is unknown."""

    x: float
    y: float
    label: str = ""
    interval: tuple[float, ...] = ()


@dataclass(frozen=True)
class Look:
    """The look of a series: the numbers of its colour and its dashes, counted from 0; a baseline has colour -1."""

    colour: int
    dash: int


@dataclass(frozen=True)
class Series:
    """Points of a plot that belong together.

    kind: "marks" are not joined; a "baseline" is compared with the others. limits: what its points must not exceed,
    drawn as bars in the colour of the series. look: None for the next free one.
    """

    name: str
    points: Sequence[Point]
    kind: Literal["marks", "line", "baseline"] = "line"
    limits: Sequence[Point] = ()
    look: Look | None = None


def scatter(
    key: str, title: str, description: str, x: Axis, y: Axis, series: Sequence[Series], width: int = WIDTH
) -> str:
    """Series over two axes. key: unique on the page. Values that are not finite are crosses at the upper edge."""
    points = _points(series)
    heights = [y for p in points for y in (p.y, *p.interval)]
    across = scale_of([p.x for p in points], x, LEFT + EDGE, width - RIGHT - EDGE)
    has_zero = y.logarithmic and any(p.y <= 0 for p in points)
    up = scale_of(heights, y, TOP + PLOT_HEIGHT, TOP, has_zero)
    body = [*y_axis(y, up, has_zero, width - RIGHT), *x_axis(x, across, TOP + PLOT_HEIGHT)]
    for one, look, aside in zip(series, _looks(series), _aside(len(series)), strict=True):
        shift = aside if one.kind == "marks" else 0.0
        finite = [(across(p.x) + shift, up(p.y)) for p in one.points if math.isfinite(p.y)]
        parts = [_bar(across(p.x) + aside, up(p.y)) for p in one.limits if math.isfinite(p.y)]
        if one.kind != "marks" and len(finite) > 1:
            parts.append(_line(look, "M" + "L".join(f"{left:.1f} {top:.1f}" for left, top in finite)))
        parts += [
            f'<path class="line" d="M{across(p.x) + shift:.1f} {up(p.interval[0]):.1f}V{up(p.interval[1]):.1f}"/>'
            for p in one.points
            if p.interval
        ]
        parts += [
            _point(one, look, p, p.y, across(p.x) + shift, up(p.y), (across(p.x) + shift, TOP)) for p in one.points
        ]
        body.append(_group(one, look, parts))
    return _svg(key, title, description, width, TOP + PLOT_HEIGHT + 46, body)


def dots(key: str, title: str, description: str, axis: Axis, names: Sequence[str], series: Sequence[Series]) -> str:
    """Values of named rows along one axis, below each other. Points have their value in x and the row, from 0, in y."""
    points = _points(series)
    has_zero = axis.logarithmic and any(p.x <= 0 for p in points)
    across = scale_of([p.x for p in points], axis, 2 * EDGE, WIDTH - 2 * EDGE, has_zero)
    body = list(x_axis(axis, across, len(names) * ROW, has_zero))
    for row, name in enumerate(names):
        top = row * ROW
        body += [text_at(0, top + ROW_NAME, name), f'<path class="grid" d="M0 {top + ROW - 11}H{WIDTH}"/>']
    for one, look, aside in zip(series, _looks(series), _aside(len(series)), strict=True):

        def height(point: Point, aside: float = aside) -> float:
            return point.y * ROW + ROW - 11 + aside / 2

        parts = [_bar(across(p.x), height(p), upright=True) for p in one.limits if math.isfinite(p.x)]
        parts += [_point(one, look, p, p.x, across(p.x), height(p), (WIDTH - EDGE, height(p))) for p in one.points]
        body.append(_group(one, look, parts))
    return _svg(key, title, description, WIDTH, len(names) * ROW + 46, body)


def legend_of(series: Sequence[Series]) -> tuple[Entry, ...]:
    """The legend of a plot: a line for each series, and one for values that are not finite, if there are any."""
    entries = []
    for one, look in zip(series, _looks(series), strict=True):
        parts = [] if one.kind == "marks" else [_line(look, f"M2 {SIGN_MIDDLE}h{SIGN_WIDTH - 4}")]
        parts += [_bar(SIGN_WIDTH / 2, 2)] if one.limits else []
        entries.append(Entry(_group(one, look, [*parts, _mark(one, look, SIGN_WIDTH / 2, SIGN_MIDDLE)]), one.name))
    if not all(math.isfinite(p.x) and math.isfinite(p.y) for p in _points(series)):
        entries.append(Entry(_cross(SIGN_WIDTH / 2, SIGN_MIDDLE), "NaN or infinite"))
    return tuple(entries)


def histogram(
    key: str, title: str, description: str, x: str, labels: Sequence[str], counts: Sequence[int], limit: float | None
) -> str:
    """Bars over the decades between `labels`, one bar more than labels; heights are logarithmic, to show the tail.

    limit: where the limit lies, counted in labels from the left edge: 2.5 is between the second and the third label.
    """
    up = Scale(0.5, max(10, *counts), TOP + PLOT_HEIGHT, TOP + 14, True)
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    body, said = list(y_axis(Axis("elements", True), up, False, WIDTH - RIGHT, short)), []
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
    return _svg(key, title, description, WIDTH, TOP + PLOT_HEIGHT + 50, body)


def _svg(key: str, title: str, description: str, width: float, height: float, body: Iterable[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width} {height:.0f}" aria-labelledby="{escape(key)}-title {escape(key)}-desc">'
        f'<title id="{escape(key)}-title">{escape(title)}</title>'
        f'<desc id="{escape(key)}-desc">{escape(description)}</desc>{"".join(body)}</svg>'
    )


def _points(series: Sequence[Series]) -> list[Point]:
    return [point for one in series for point in (*one.points, *one.limits)]


def _looks(series: Sequence[Series]) -> list[Look]:
    """The look of each series. Baselines have fixed colours."""
    looks, free = [], 0
    for one in series:
        looks.append(one.look or Look(free, 2 if one.kind == "baseline" else free // SERIES_COLOURS))
        free += one.kind != "baseline"
    return looks


def _aside(count: int) -> list[float]:
    """Offsets that keep several series apart, in pixels."""
    step = min(BAR + 2, MAX_SPREAD / count)
    return [(n - (count - 1) / 2) * step for n in range(count)]


def _group(series: Series, look: Look, parts: Sequence[str]) -> str:
    is_baseline = series.kind == "baseline" or look.colour < 0
    return f'<g class="{"baseline" if is_baseline else f"s{look.colour % SERIES_COLOURS}"}">{"".join(parts)}</g>'


def _point(
    series: Series, look: Look, point: Point, value: float, x: float, y: float, beyond: tuple[float, float]
) -> str:
    """A mark with its tooltip; a cross at `beyond` for a value that is not finite."""
    label = f"<title>{escape(point.label)}</title>" if point.label else ""
    return f"<g>{label}{_mark(series, look, x, y) if math.isfinite(value) else _cross(*beyond)}</g>"


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10"/>'


def _bar(x: float, y: float, upright: bool = False) -> str:
    """The bar that marks a limit."""
    left, top = (x, y - BAR / 2) if upright else (x - BAR / 2, y)
    return f'<path class="limit" d="M{left:.1f} {top:.1f}{"v" if upright else "h"}{BAR}"/>'


def _mark(series: Series, look: Look, x: float, y: float) -> str:
    """A mark; that of a baseline is a ring."""
    if series.kind == "baseline":
        return f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return MARKS[look.colour % len(MARKS)](x, y)


def _line(look: Look, path: str) -> str:
    pattern = DASHES[look.dash % len(DASHES)]
    dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
    return f'<path class="line" d="{path}"{dashes}/>'
