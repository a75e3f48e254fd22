"""Benchmarks as Markdown, for the documentation and for pull requests, and their plots as files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from effexport.bench.rendering.curves import crossovers, curves, is_timed
from effexport.bench.rendering.headline import headlines, interruption, parity_sentence, problems, status_of, verdict
from effexport.bench.rendering.page import title_of
from effexport.bench.rendering.plots import QUANTITIES, figures_of
from effexport.bench.rendering.table import parity_text
from effexport.bench.results import BenchResults, Row
from effexport.plots.svg_file import svg_file
from effexport.report.rendering.markdown import SIGNS, escaped, fenced, folded, table
from effexport.report.rendering.templates import template_environment
from effexport.units import NOTHING, duration_with, memory, moment, three_digits

HEAD = ("model", "tokens", "runtime", "median ± spread", "× softmax", "× torch", "× floor", "peak memory", "parity")
# A longer table is folded.
MAX_OPEN_ROWS = 40


def markdown_from_results(results: BenchResults) -> str:
    """The findings, a table of the rows, what failed, where softmax is overtaken, and how to repeat it."""
    rows = table(HEAD, [_cells(row) for row in _by_length(results.rows)], right=6)
    many = len(results.rows) > MAX_OPEN_ROWS
    pays = [(curve.label, curve.place, str(crossover)) for curve, crossover in crossovers(curves(results))]
    parts = [
        f"### {escaped(title_of(results))}",
        "\n".join(f"* {escaped(sentence)}" for sentence in headlines(results)),
        interruption(results),
        f"{SIGNS[verdict(results)]} {escaped(parity_sentence(results))}",
        folded(f"All {len(results.rows)} rows", rows) if many else rows if results.rows else "",
        "\n".join(f"* {escaped(f'{one.status}: {one.reason}. {one.rows}')}" for one in problems(results)),
        table(("model", "where", "against softmax there, it is"), pays) if pays else "",
        escaped(_conditions(results)),
        folded("Repeat it", fenced(results.command)),
        folded("Machine and versions", table(("part", "value"), [*_known(results.machine | results.environment)])),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plot_svg_from_results(results: BenchResults, what: Literal["latency", "memory"]) -> str:
    """The plots of one quantity as a file: with their own colours, for light and dark, and their own background."""
    found = figures_of(results, what)
    style = template_environment(("plots",)).get_template("plot.css.j2").render()
    return svg_file(QUANTITIES[what].title if found else f"No {what} was measured.", found, style)


def _by_length(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.case.seq_len)


def _cells(row: Row) -> tuple[str, ...]:
    case = row.case
    place = case.runtime if case.batch == 1 else f"{case.runtime}, batch {case.batch}"
    name = (case.label, f"{case.seq_len:,}", place)
    if not is_timed(row) or row.timing is None:
        return (*name, status_of(row), *[NOTHING] * 4, parity_text(row))
    ratios = (three_digits(row.times_softmax), three_digits(row.times_torch), three_digits(row.times_floor))
    median = duration_with(row.timing.median_ms, row.timing.spread_ms)
    return (*name, median, *ratios, memory(row.peak_bytes), parity_text(row))


def _conditions(results: BenchResults) -> str:
    """One line: what was measured, how often, and when."""
    cases = [row.case for row in results.rows]
    parts = [
        " and ".join(dict.fromkeys(f"{case.scope}, {case.precision}" for case in cases)),
        f"medians over {results.rounds} rounds in which the candidates take turns",
        f"{results.threads} threads" if results.threads else "",
        moment(results.created),
    ]
    return "; ".join(part for part in parts if part)


def _known(values: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, value or "not installed") for name, value in values.items()]
