"""The page of a report in a browser: nothing from elsewhere, readable by everyone, at every width and on paper."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from page_browser import (
    HEADINGS,
    OVERFLOW,
    RULES,
    WIDE,
    Browser,
    complaints,
    contrast,
    foreign_text_colours,
    plots_with_clear_text,
    weak_colours,
)

from effexport.artifact import Artifact, EngineEntry, open_artifact
from effexport.base.dtypes import TensorInfo
from effexport.proof.check import CaseLabel, Check, Worst, not_run
from effexport.render.formats import html_from_document
from effexport.report.compare import Comparison, Side, document_from_comparison
from effexport.report.formats import html_from_report, side_of_artifact
from effexport.report.report import LayerError, Report
from effexport.tasks.figures import Changes, Estimate, Quality

pytestmark = pytest.mark.requires("browser")
NARROW = 390


def failed_report() -> Report:
    """Everything that a report can hold, and much of it has gone wrong."""
    histogram = (5, 10, 100, 2000, 30000, 9000, 120, 3, 0, 1, 0)
    checks = [
        Check(
            "arithmetic with identical buckets",
            CaseLabel(f"case {seq_len}", (1, seq_len)),
            "max |error| / RMS",
            "failed" if not value <= 2e-4 else "passed",
            value,
            2e-4,
            "float32 sums of this length",
            "worst at last_hidden_state[0, 63, 17]: 0.5, reference 0.25",
            {"max_abs": 0.25, "rms_error": 1e-6, "cosine": 0.999999},
            Worst("last_hidden_state", (0, 63, 17), 0.5, 0.25),
            seq_len,
            histogram,
        )
        for seq_len, value in [(1, 0.0), (7, 1e-7), (300, 2.5e-6), (639, 3e-3), (1024, math.nan)]
    ]
    for seq_len, flips in ((300, 0.0), (1024, 3.0)):
        case = CaseLabel(f"case {seq_len}", (1, seq_len))
        checks.append(
            Check("bucket agreement", case, "buckets that differ", "passed", flips, 5, "few", seq_len=seq_len)
        )
        checks.append(Check("bucket near-ties", case, "widest margin", "passed", flips * 1e-7, 3.8e-6, "tied"))
    checks.append(not_run("parity", "there is no GPU", target="trt-rtx"))
    names = ["embedding", "blocks.0.attention", "blocks.0.feed_forward", "blocks.1.attention", "norm"]
    return Report(
        title="lsh encoder",
        spec={
            "scope": "encoder",
            "precision": "fp32",
            "opset": 20,
            "seed": 0,
            "model": {"attention": {"variant": "lsh"}},
        },
        checks=checks,
        environment={"effexport": "0.1.0", "torch": "2.13.0", "tensorrt": None},
        created="2026-01-02T03:04:05+00:00",
        notes=["Published checkpoints let the end of a sequence leak into its start."],
        seconds={"exporting to ONNX": 1.23, "checking parity in ONNX Runtime": 4.5},
        implementation={"LSHSort": "kernel"},
        engines=[an_engine()],
        layers=[LayerError(layer=name, op_type="Add", error=1e-7 * 4**n) for n, name in enumerate(names)],
        quality=some_quality(),
    )


def some_quality() -> Quality:
    bits, perplexity = Estimate("bits per byte", 3.2411, 3.2102, 3.272), Estimate("perplexity", 1e9, 9e8, 2e9)
    difference = Estimate("bits per byte", 2e-9, 1e-9, 3e-9)
    both = (bits, perplexity)
    return Quality("held-out.txt", "5" * 64, "language model", 9, both, both, (difference,), Changes(1, 10**6))


def an_engine() -> EngineEntry:
    return EngineEntry(
        target="trt-rtx",
        file="engine/trt-rtx.engine",
        tensorrt_version="1.7.1.116",
        compute_capabilities=(),
        profiles=({"input_ids": ((1, 1), (1, 1024), (4, 1024))},),
        implementation={"LSHSort": "plugin"},
        layers=123,
        bytes=12345678,
        build_seconds=33.3,
        remarks=("Sequences of less than 64 tokens are padded.",),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of made-up reports, by name."""
    report = failed_report()
    empty = Report("softmax attention", report.spec, [], {"effexport": "0.1.0"}, report.created)
    ids = TensorInfo("input_ids", "int64", ("batch", "seq"))
    first = Side("artifacts/first", report, {"model.onnx": 1234567, "reference.safetensors": 9876}, (ids,), (ids,))
    second = Side("artifacts/second", empty)
    texts = {
        "failed": html_from_report(first, "."),
        "empty": html_from_report(second),
        "comparison": html_from_document(document_from_comparison(Comparison(first, second))),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


PAGES = ("failed", "empty", "comparison")
every_page = pytest.mark.parametrize("name", PAGES)


@every_page
def test_a_page_opens_without_complaint_and_asks_nobody(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    assert browser.evaluate("document.readyState") == "complete"
    assert complaints(browser) == []
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", pages[name].read_text(encoding="utf-8"))


def test_a_page_that_asks_for_something_is_noticed(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text('<!doctype html><img src="absent.png"><script>console.error(1)</script>')
    browser.open(tmp_path / "bad.html")
    assert len(complaints(browser)) >= 2


@pytest.mark.requires("torch", "onnx", "ort")
def test_the_pages_of_real_artifacts_are_as_good(
    browser: Browser, built: Callable[..., Artifact], tmp_path: Path
) -> None:
    folder = built("lsh", "encoder").path
    browser.open(folder / "report.html", NARROW)
    assert complaints(browser) == []
    assert browser.evaluate(OVERFLOW) <= 0
    assert browser.evaluate(HEADINGS)[0] == 1
    side = side_of_artifact(open_artifact(folder), str(folder))
    (tmp_path / "two.html").write_text(
        html_from_document(document_from_comparison(Comparison(side, side))), encoding="utf-8"
    )
    browser.open(tmp_path / "two.html", NARROW)
    assert complaints(browser) == []
    assert browser.evaluate(OVERFLOW) <= 0


@every_page
@pytest.mark.parametrize("rule", RULES)
def test_a_page_keeps_the_rules_of_accessibility(
    browser: Browser, pages: dict[str, Path], name: str, rule: str
) -> None:
    browser.open(pages[name])
    assert browser.evaluate(f"({RULES[rule]}).map(e => e.outerHTML.slice(0, 120))") == []


@every_page
def test_headings_begin_with_one_h1_and_skip_no_level(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    levels = browser.evaluate(HEADINGS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert browser.evaluate("document.documentElement.lang") == "en"
    assert browser.evaluate("document.title")


@every_page
@pytest.mark.parametrize("width", [320, NARROW, WIDE])
def test_a_page_never_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width)
    browser.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.evaluate(OVERFLOW) <= 0


def test_details_open_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["failed"])
    browser.evaluate("document.querySelector('details:not([open]) > summary').focus()")
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **key)
    assert browser.evaluate("document.activeElement.parentElement.open") is True


@every_page
def test_printing_shows_what_is_folded(browser: Browser, pages: dict[str, Path], name: str) -> None:
    hidden = (
        "[...document.querySelectorAll('details:not([open]) > :not(summary)')]"
        ".filter(e => !e.checkVisibility({contentVisibilityAuto: true})).length"
    )
    browser.open(pages[name])
    folded = browser.evaluate(hidden)
    assert folded == browser.evaluate("document.querySelectorAll('details:not([open]) > :not(summary)').length")
    browser.open(pages[name], media="print")
    assert browser.evaluate(hidden) == 0
    assert browser.evaluate("[...document.querySelectorAll('nav')].every(e => !e.checkVisibility())") is True


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_tables_are_tables_for_screen_readers_at_every_width(
    browser: Browser, pages: dict[str, Path], width: int
) -> None:
    browser.open(pages["failed"], width)
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    rows, headers = browser.evaluate(
        "['tr', 'thead th'].map(q => [...document.querySelectorAll(q)].filter(e => e.checkVisibility()).length)"
    )
    assert roles.count("row") == rows
    assert roles.count("columnheader") == headers
    plots = [node["name"]["value"] for node in nodes if node["role"]["value"] == "image"]
    assert any("Error against sequence length" in plot for plot in plots)


def test_contrast_is_as_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize(("scheme", "media"), [("light", "screen"), ("dark", "screen"), ("dark", "print")])
def test_every_colour_stands_out_from_its_background(
    browser: Browser, pages: dict[str, Path], scheme: str, media: str
) -> None:
    browser.open(pages["failed"], scheme=scheme, media=media)
    assert weak_colours(browser, is_dark=scheme == "dark" and media == "screen") == {}


@every_page
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_text_has_a_colour_of_its_own(browser: Browser, pages: dict[str, Path], name: str, scheme: str) -> None:
    browser.open(pages[name], scheme=scheme)
    assert foreign_text_colours(browser) == set()


@pytest.mark.parametrize(("name", "plots"), [("failed", 3), ("empty", 0), ("comparison", 3)])
def test_text_of_plots_is_inside_of_them_and_does_not_overlap(
    browser: Browser, pages: dict[str, Path], name: str, plots: int
) -> None:
    browser.open(pages[name])
    assert plots_with_clear_text(browser) == plots


def test_the_ratio_of_a_comparison_is_in_sight_on_a_narrow_screen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["comparison"], NARROW)
    heads = browser.evaluate(
        "[...document.querySelectorAll('th')].filter(e => e.textContent === 'Ratio')"
        ".map(e => e.getBoundingClientRect().right)"
    )
    assert heads
    assert all(right <= NARROW for right in heads)


def test_no_number_of_a_comparison_is_cut_on_a_narrow_screen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["comparison"], 600)
    browser.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    widths = browser.evaluate(
        "[...document.querySelectorAll('.data')].map(e => [e.scrollWidth, e.parentElement.clientWidth])"
    )
    assert len(widths) == 5
    assert all(inner <= outer for inner, outer in widths)
