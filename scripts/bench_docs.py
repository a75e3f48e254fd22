"""A benchmark as Markdown, for the documentation and for pull requests, and its plots as files of their own.

    effexport bench -o bench/
    .venv/bin/python scripts/bench_docs.py bench/results.json --plots docs/images > bench.md

The plots are latency.svg and memory.svg, with their own colours for light and dark: a README cannot show a page.
"""

from __future__ import annotations

import argparse
import math
from html import escape
from pathlib import Path
from typing import Literal

from effexport.bench.grid import BenchResults, results_from_json
from effexport.bench.page import QUANTITIES, bench_chart, document_from_results
from effexport.render.document import Chart
from effexport.render.formats import markdown_from_document, template_environment
from effexport.render.svg import PANEL_WIDTH, SIGN_WIDTH, text_at

# Pixels around plots and for their titles; plots side by side; lines of the legend.
MARGIN, HEADING, COLUMNS, LEGEND_ROW = 16, 24, 3, 22


def plot_svg_from_results(results: BenchResults, what: Literal["latency", "memory"]) -> str:
    """The plots of one quantity as a file: with their own colours, for light and dark, and their own background."""
    style = template_environment(("render",)).get_template("plot.css.j2").render()
    chart = bench_chart(results, [what])
    return svg_file(QUANTITIES[what][0].title if chart else f"No {what} was measured.", chart, style)


def svg_file(title: str, chart: Chart | None, style: str) -> str:
    """A chart of one quantity as one SVG file: its panels, and the legend below; without a chart, only `title`.

    style: CSS, in which `.page` is the background.
    """
    panels = [] if chart is None else [panel for row in chart.rows.values() for panel in row]
    entries = [] if chart is None else chart.legend
    columns = max(1, min(COLUMNS, len(panels)))
    height = max((_size(panel.svg)[1] for panel in panels), default=0) + HEADING
    width = max(2, columns) * (PANEL_WIDTH + MARGIN) + MARGIN
    top = MARGIN + HEADING
    body = [_heading(MARGIN, MARGIN, title)]
    for n, panel in enumerate(panels):
        x, y = MARGIN + n % columns * (PANEL_WIDTH + MARGIN), top + n // columns * height
        place = f'<svg x="{x}" y="{y + HEADING}" width="{_size(panel.svg)[0]}" height="{height - HEADING}" '
        # a single panel is headed by the title
        body += [_heading(x, y, panel.title)] if len(panels) > 1 else []
        body.append(panel.svg.replace("<svg ", place, 1))
    top += math.ceil(len(panels) / columns) * height + MARGIN
    for n, entry in enumerate(entries):
        x, y = MARGIN + n % columns * (PANEL_WIDTH + MARGIN), top + n // columns * LEGEND_ROW
        body.append(
            f'<g transform="translate({x} {y})">{entry.sign}</g>{text_at(x + SIGN_WIDTH + 6, y + 14, entry.name)}'
        )
    total = top + math.ceil(len(entries) / columns) * LEGEND_ROW + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{total}" '
        f'viewBox="0 0 {width} {total}" aria-labelledby="title"><title id="title">{escape(title)}</title>'
        f"<style>{escape(style, quote=False)}</style>"
        f'<rect class="page" width="{width}" height="{total}"/>{"".join(body)}</svg>\n'
    )


def _size(svg: str) -> tuple[int, int]:
    """Width and height of a plot in pixels, from its view box."""
    *_, width, height = svg.partition('viewBox="')[2].partition('"')[0].split()
    return math.ceil(float(width)), math.ceil(float(height))


def _heading(x: float, y: float, text: str) -> str:
    return f'<text class="heading" x="{x}" y="{y + 12}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the results.json of effexport bench")
    parser.add_argument("--plots", type=Path, help="folder for latency.svg and memory.svg")
    options = parser.parse_args()
    results = results_from_json(options.results)
    print(markdown_from_document(document_from_results(results)), end="")
    if options.plots is not None:
        for what in ("latency", "memory"):
            (options.plots / f"{what}.svg").write_text(plot_svg_from_results(results, what), encoding="utf-8")


if __name__ == "__main__":
    main()
