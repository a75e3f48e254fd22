"""Benchmarks as pages: one self-contained file, no scripts, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.bench.rendering.beside import measured_sheet, sections
from effexport.bench.rendering.curves import crossovers, curves
from effexport.bench.rendering.headline import disturbance, headlines, interruption, parity_sentence, problems, verdict
from effexport.bench.rendering.plots import bench_chart, frontier_chart, mean_ratio_chart
from effexport.bench.rendering.published import TITLES
from effexport.bench.rendering.table import differing_options, table_of
from effexport.bench.results import BenchResults
from effexport.render.templates import template_environment
from effexport.units import listed, memory, moment

if TYPE_CHECKING:
    from effexport.bench.rendering.advise import Advice

# A longer table is folded, so that the sections below it are easy to find.
MAX_OPEN_ROWS = 40


def html_from_results(results: BenchResults, advice: Advice | None = None) -> str:
    """The page of a benchmark, which may be incomplete; one of `bench --advise` begins with its advice."""
    environment = template_environment(
        ("render", "bench/rendering"),
        {"moment": moment, "memory": memory, "css": lambda text: text.replace(" ", "-")},
    )
    return environment.get_template("page.html.j2").render(
        results=results,
        advice=advice,
        frontier=None if advice is None else frontier_chart(advice),
        title=title_of(results),
        headlines=headlines(results),
        verdict=verdict(results),
        parity=parity_sentence(results),
        interruption=interruption(results),
        disturbance=disturbance(results),
        problems=problems(results),
        sections=sections(results),
        measured=measured_sheet(results),
        by_mean=mean_ratio_chart(results) if results.preset == "linear-blog" else None,
        speed=bench_chart(results),
        crossovers=crossovers(curves(results)),
        table=table_of(results.rows),
        is_open=len(results.rows) <= MAX_OPEN_ROWS,
        options=differing_options(results.rows),
        versions={name: text for name, text in results.environment.items() if name not in results.machine},
        has_floors=any(row.floor for row in results.rows),
        has_memory=any(row.peak_bytes is not None for row in results.rows),
    )


def title_of(results: BenchResults) -> str:
    """The published experiment that is repeated, else the models that are compared."""
    if results.preset:
        return f"Repeated: {TITLES.get(results.preset, results.preset)}"
    labels = list(dict.fromkeys(row.case.label for row in results.rows))
    if not labels or len(labels) > 6:
        return f"Attention benchmark of {len(labels)} models" if labels else "Attention benchmark"
    return f"Attention benchmark: {listed(labels)}"
