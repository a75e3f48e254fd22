"""Plots in a file of their own, with their style and background: for a README, which cannot show a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from effexport.plots.axes import WIDTH
from effexport.plots.figure import Figure

MARGIN, HEADING, COLUMNS = 16, 24, 2


def svg_file(title: str, figures: Sequence[Figure], style: str) -> str:
    """Plots with their titles, in two columns, as one SVG file; without figures, only `title`.

    style: CSS, in which `.page` is the background.
    """
    columns = max(1, min(COLUMNS, len(figures)))
    heights = [_height(figure.svg) for figure in figures]
    rows = [max(heights[n : n + columns]) for n in range(0, len(heights), columns)] or [0]
    width = columns * (WIDTH + MARGIN) + MARGIN
    height = sum(rows) + len(rows) * (HEADING + MARGIN) + MARGIN
    body = [] if figures else [_heading(MARGIN, MARGIN, title)]
    for n, figure in enumerate(figures):
        x = MARGIN + n % columns * (WIDTH + MARGIN)
        y = MARGIN + sum(rows[: n // columns]) + n // columns * (HEADING + MARGIN)
        place = f'<svg x="{x}" y="{y + HEADING}" width="{WIDTH}" height="{heights[n]}" '
        body += [_heading(x, y, figure.title), figure.svg.replace("<svg ", place, 1)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" aria-labelledby="title"><title id="title">{escape(title)}</title>'
        f"<style>{escape(style, quote=False)}</style>"
        f'<rect class="page" width="{width}" height="{height}"/>{"".join(body)}</svg>\n'
    )


def _height(svg: str) -> int:
    """The height of a plot in pixels, from its view box."""
    return math.ceil(float(svg.partition('viewBox="')[2].partition('"')[0].split()[3]))


def _heading(x: float, y: float, text: str) -> str:
    return f'<text class="heading" x="{x}" y="{y + 12}">{escape(text)}</text>'
