"""Benchmarks as Markdown, and their plots as files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_results import FAILED, LENGTHS, MODELS, results, row, without_timing
from page_browser import Browser, complaints

from effexport.bench.grid import BenchResults
from effexport.bench.page import document_from_results
from effexport.render.formats import markdown_from_document

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench_docs import main, plot_svg_from_results  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def markdown_from_results(found: BenchResults) -> str:
    return markdown_from_document(document_from_results(found))


def test_a_row_is_a_line_with_its_figures() -> None:
    text = markdown_from_results(results((row("softmax", 512), row("linear", 512))))
    assert "| 512 | linear | 800 ± 16 µs | 640 k | 1.00 | 1.25 | 3.20 | 250 µs | 1.00 MB | 2.5e-06 of 0.0002 |" in text
    assert "✅ All 2 candidates passed parity." in text
    assert "Median of 5 rounds, 2 threads" in text
    assert "ort, core, fp32, batch 1" in text


def test_rows_without_a_timing_say_why_and_have_no_figures() -> None:
    rows = (
        replace(row("linear", 512), status="failed", parity=FAILED, reason="parity: max |error| / RMS 0.003 > 0.0002"),
        without_timing("not run", "there is no GPU", runtime="trt"),
    )
    text = markdown_from_results(results(rows, complete=False))
    assert "| 512 | linear | ort | failed |" in text
    assert "* ❌ **failed**: parity: max \\|error\\| / RMS 0.003 &gt; 0.0002" in text
    assert "* ⚠️ **not run**: there is no GPU (linear on trt at 1,024 tokens)" in text
    assert "❌ The one candidate failed parity: linear on ort at 512 tokens. 1 row was not run." in text
    assert "Interrupted after 2 rows. The other rows are missing." in text


def test_the_length_at_which_softmax_is_overtaken_is_in_a_table() -> None:
    text = markdown_from_results(results())
    assert "| lsh, 4 rounds | ort | faster from about 4,096 tokens on |" in text
    assert "<details><summary>60 rows by length</summary>" in text


def test_hostile_text_stays_text() -> None:
    one = row("linear", 512)
    bad = replace(one, case=replace(one.case, label="<img src=x> | @somebody `x`"))
    text = markdown_from_results(results((bad,)))
    assert "<img" not in text
    assert "@somebody" not in text
    assert "\\| @\u2060somebody" in text


@pytest.mark.parametrize("what", ["latency", "memory"])
@pytest.mark.parametrize("rows", [None, (), tuple(row(label, n) for label in MODELS for n in LENGTHS)])
def test_a_plot_is_a_file_for_light_and_dark(what: str, rows: tuple[object, ...] | None) -> None:
    svg = plot_svg_from_results(results(rows), what)  # type: ignore[arg-type]
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    assert root.find(f"{SVG}rect[@class='page']") is not None
    assert len(root.findall(f"{SVG}svg")) == {None: 3, 0: 0, 20: 1}[None if rows is None else len(rows)]
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_what_was_not_measured_has_a_plot_that_says_so() -> None:
    rows = tuple(replace(row("linear", n), peak_bytes=None) for n in LENGTHS)
    assert "No memory was measured." in plot_svg_from_results(results(rows), "memory")


@pytest.mark.requires("browser")
def test_a_plot_file_opens_without_complaint(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "plot.svg").write_text(plot_svg_from_results(results(), "latency"), encoding="utf-8")
    for scheme, is_dark in (("light", False), ("dark", True)):
        browser.open(tmp_path / "plot.svg", scheme=scheme)
        assert complaints(browser) == []
        fill = browser.evaluate("getComputedStyle(document.querySelector('.page')).fill")
        assert (fill == "rgb(21, 25, 30)") == is_dark


def test_the_script_reads_results_and_writes_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: BenchResults = results()
    (tmp_path / "results.json").write_text(found.to_json(), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench_docs.py", str(tmp_path / "results.json"), "--plots", str(tmp_path)])
    main()
    assert capsys.readouterr().out == markdown_from_results(found)
    assert (tmp_path / "latency.svg").read_text() == plot_svg_from_results(found, "latency")
    assert (tmp_path / "memory.svg").is_file()
