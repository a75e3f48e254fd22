"""The document of a sweep: what it says."""

from __future__ import annotations

from sweep_results import many, mixed, results, row

from effexport.artifact import CheckSummary, EngineEntry
from effexport.bench.grid import SweepResults
from effexport.bench.page import document_from_sweep, sweep_chart
from effexport.bench.sweep import engine_parity, engine_text, worst_of_summary
from effexport.render.formats import html_from_document


def html_from_results(found: SweepResults) -> str:
    return html_from_document(document_from_sweep(found))


def test_the_page_says_what_failed_why_and_how_to_repeat_it() -> None:
    page = html_from_results(mixed())
    assert "4 cells: 2 finished, 1 failed and 1 not run" in page
    assert "its process was ended by SIGSEGV; see the log" in page
    assert "Fatal Python error: Segmentation fault" in page
    assert page.count("effexport sweep sweep.toml -o out --only") == 2
    assert 'href="cells/lsh-512-fp32-trt-rtx-sm_89-0123456789ab/artifact/report.html"' in page
    assert "lsh-4096-fp32-trt-rtx-sm_89-0123456789ab/artifact" not in page


def test_a_long_table_is_folded_and_an_interrupted_sweep_says_so() -> None:
    assert "<details open>" in html_from_results(mixed())
    page = html_from_results(many())
    assert "<details open>" not in page
    assert "Interrupted: run the same command again" in page


def test_a_row_says_the_worst_of_all_checks_and_whether_the_engine_ran() -> None:
    def entry(worst: float | None, metric: str = "max |error| / RMS", **counts: int) -> CheckSummary:
        return CheckSummary(**{"passed": 0, "failed": 0, "not_run": 0, **counts}, worst=worst, limit=1.0, metric=metric)

    summary = {
        "arithmetic": entry(1e-6, passed=2),
        "bodies": entry(2e-6, passed=1),
        "buckets": entry(5.0, metric="buckets that differ", passed=1),
        "trt-rtx: arithmetic": entry(None, not_run=3),
    }
    assert worst_of_summary(summary) == (2e-6, 1.0)
    assert worst_of_summary({}) == (None, None)
    assert engine_parity(summary, "trt-rtx") == "not run"
    assert engine_parity({"trt: arithmetic": entry(1e-6, passed=1)}, "trt") == "passed"
    engine = EngineEntry(
        target="trt-rtx",
        file="engine/trt-rtx.engine",
        tensorrt_version="1.7",
        compute_capabilities=(),
        profiles=(),
        implementation={},
        layers=7,
        bytes=2_500_000,
        build_seconds=1.9,
        remarks=(),
    )
    assert engine_text(engine) == "1.7, SM 80 and later, 2.5 MB, 7 layers, 1.9 s"


def test_error_size_and_time_are_plotted_against_length_with_a_panel_for_each_precision() -> None:
    rows = [
        row(length, label=label, precision=precision)
        for label in ("a", "b")
        for length in (512, 2048)
        for precision in ("fp32", "fp16")
    ]
    chart = sweep_chart(rows)
    assert chart is not None
    quantities = ["Worst error against length", "Size of the model against length", "Time of the build against length"]
    assert {title: [panel.title for panel in panels] for title, panels in chart.rows.items()} == {
        title: ["fp32", "fp16"] for title in quantities
    }
    assert [entry.name for entry in chart.legend] == ["a", "b"]
    limits = [[panel.svg.count('class="limit"') for panel in panels] for panels in chart.rows.values()]
    assert limits == [[4, 4], [0, 0], [0, 0]]
    page = html_from_results(results(*rows))
    assert page.count('<figure class="chart">') == 1
    assert sweep_chart([row(512), row(512, label="b"), row(2048, status="failed")]) is None
