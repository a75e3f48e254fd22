"""The page of a sweep: what it says, and how it looks in a browser."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from documents import assert_formats_agree
from page_browser import (
    HEADINGS,
    OVERFLOW,
    RULES,
    WIDE,
    Browser,
    complaints,
    foreign_text_colours,
    weak_colours,
)

from effexport.artifact import CheckSummary, EngineEntry
from effexport.bench.sweep import (
    MAX_OPEN_ROWS,
    SweepResults,
    document_from_results,
    engine_parity,
    engine_text,
    sweep_chart,
    worst_of_summary,
)
from effexport.bench.sweep import SweepRow as Row
from effexport.render.html import html_from_document


def html_from_results(found: SweepResults) -> str:
    return html_from_document(document_from_results(found))


HOSTILE = """<script>alert(1)</script> & "quotes" 'too'"""


def row(seq_len: int = 512, label: str = "lsh, 4 rounds", **fields: Any) -> Row:
    name = f"lsh-{seq_len}-fp32-trt-rtx-sm_89-0123456789ab"
    known: dict[str, Any] = {
        "id": name,
        "label": label,
        "variant": "lsh",
        "scope": "encoder",
        "seq_len": seq_len,
        "batch": 1,
        "precision": "fp32",
        "target": "trt-rtx",
        "gpu": "sm_89",
        "status": "finished",
        "command": f"effexport sweep sweep.toml -o out --only {name}",
        "is_new": True,
        "parity": "passed",
        "worst_error": 3.7e-6,
        "error_limit": 2e-4,
        "engine": "1.7.1.116, SM 89, 2.5 MB, 701 layers, 1.9 s",
        "engine_parity": "not run",
        "seconds": 19.5,
        "peak_bytes": 700_000_000,
        "artifact_bytes": 9_900_000,
        "model_bytes": 7_200_000,
        "attempts": 1,
        "artifact": f"cells/{name}/artifact",
        "log": f"cells/{name}/log.txt",
    }
    return Row(**known | fields)


def results(*rows: Row, **fields: Any) -> SweepResults:
    known: dict[str, Any] = {
        "name": "night",
        "created": "2026-01-02T03:04:05+00:00",
        "command": "effexport sweep night.toml",
        "where": "this machine, 2 cells at a time",
        "seconds": 61.2,
        "environment": {"effexport": "0.1.0", "torch": "2.13.0"},
    }
    return SweepResults(rows=rows, **known | fields)


def mixed() -> SweepResults:
    lost = {"parity": "", "worst_error": None, "engine": "", "artifact": "", "seconds": None}
    log = "… exporting to ONNX\nFatal Python error: Segmentation fault"
    return results(
        row(512),
        row(2048, label="softmax", target="onnx", gpu="", engine="", precision="fp16"),
        row(4096, status="failed", reason="its process was ended by SIGSEGV; see the log", log_tail=log, **lost),
        row(8192, status="not run", reason="no node with 1 CPU, 1 GPU and the resource sm_90 within 60 s", **lost),
    )


def hostile() -> SweepResults:
    broken = row(1, label=HOSTILE, status="failed", reason=HOSTILE, log_tail=HOSTILE, command=HOSTILE)
    return results(broken, row(2, label=HOSTILE, engine=HOSTILE, artifact=HOSTILE), name=HOSTILE, command=HOSTILE)


def many() -> SweepResults:
    return results(*(row(length) for length in range(1, 2 + MAX_OPEN_ROWS)), complete=False)


PAGES = {"mixed": mixed, "hostile": hostile, "many": many, "empty": lambda: results(row(status="not run"))}


@pytest.mark.parametrize("name", PAGES)
def test_no_text_of_results_is_taken_for_html(name: str) -> None:
    page = html_from_results(PAGES[name]())
    assert "<script" not in page
    assert "None" not in page
    assert ("&lt;script&gt;" in page) == (name == "hostile")


@pytest.mark.parametrize("name", PAGES)
def test_page_markdown_and_terminal_agree(name: str) -> None:
    assert_formats_agree(document_from_results(PAGES[name]()))


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


@pytest.mark.requires("browser")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_readable_and_fits_every_width(name: str, browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html_from_results(PAGES[name]()), encoding="utf-8")
    for width, scheme in ((WIDE, "light"), (WIDE, "dark"), (360, "light")):
        browser.open(page, width, scheme)
        assert complaints(browser) == []
        assert browser.evaluate(OVERFLOW) <= 0
        assert weak_colours(browser, scheme == "dark") == {}
        assert foreign_text_colours(browser) == set()
    levels = browser.evaluate(HEADINGS)
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for rule, elements in RULES.items():
        if rule != "links lead somewhere":  # reports and logs are files beside the page
            assert browser.evaluate(f"{elements}.map(e => e.outerHTML.slice(0, 200))") == [], rule
    inside = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(e => !document.querySelector(e.hash)).length"
    assert browser.evaluate(inside) == 0
    outside = re.findall(r'href="([^"#][^"]*)"', page.read_text(encoding="utf-8"))
    assert all("://" not in link for link in outside)
