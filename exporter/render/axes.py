"""Axes of plots: the mapping from data to pixels, and the labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

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
