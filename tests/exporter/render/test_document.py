"""Documents: their formats agree, and pages are quiet, readable by everyone, and fit every width and paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_results import RESULTS
from documents import assert_formats_agree
from page_browser import (
    HEADINGS,
    OVERFLOW,
    RULES,
    WIDE,
    Browser,
    complaints,
    foreign_text_colours,
    plots_with_clear_text,
    weak_colours,
)
from sweep_results import SWEEPS

from effexport.bench import page
from effexport.render.document import Document
from effexport.render.formats import html_from_document

DOCUMENTS: dict[str, Callable[[], Document]] = {
    **{f"bench {name}": lambda made=made: page.document_from_results(made()) for name, made in RESULTS.items()},  # type: ignore[misc]
    **{f"sweep {name}": lambda made=made: page.document_from_sweep(made()) for name, made in SWEEPS.items()},  # type: ignore[misc]
}
every_document = pytest.mark.parametrize("name", DOCUMENTS)
in_browser = pytest.mark.requires("browser")


@every_document
def test_page_markdown_and_terminal_agree(name: str) -> None:
    assert_formats_agree(DOCUMENTS[name]())


@every_document
def test_no_text_of_results_is_taken_for_html(name: str) -> None:
    text = html_from_document(DOCUMENTS[name]())
    assert "<script" not in text
    assert "None" not in text
    assert ("&lt;script&gt;" in text) == ("hostile" in name)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, made in DOCUMENTS.items():
        found[name] = folder / f"{name.replace(' ', '-')}.html"
        found[name].write_text(html_from_document(made()), encoding="utf-8")
    return found


@in_browser
@every_document
def test_a_page_is_quiet_asks_nobody_and_keeps_the_rules(browser: Browser, pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text(encoding="utf-8")
    browser.open(pages[name])
    assert complaints(browser) == []
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", text)
    for rule, broken in RULES.items():
        if rule != "links lead somewhere" or name.startswith("bench"):  # reports and logs of cells are beside the page
            assert browser.evaluate(f"({broken}).map(e => e.outerHTML.slice(0, 120))") == [], rule
    inside = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(e => !document.querySelector(e.hash)).length"
    assert browser.evaluate(inside) == 0
    levels = browser.evaluate(HEADINGS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert plots_with_clear_text(browser) == text.count("<svg role")


@in_browser
@every_document
@pytest.mark.parametrize("width", [360, WIDE])
def test_a_page_never_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width)
    browser.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.evaluate(OVERFLOW) <= 0


@in_browser
@pytest.mark.parametrize("name", ["bench broken", *(f"sweep {name}" for name in SWEEPS)])
@pytest.mark.parametrize(("scheme", "media"), [("light", "screen"), ("dark", "screen"), ("dark", "print")])
def test_every_colour_stands_out(browser: Browser, pages: dict[str, Path], name: str, scheme: str, media: str) -> None:
    browser.open(pages[name], scheme=scheme, media=media)
    assert weak_colours(browser, is_dark=scheme == "dark" and media == "screen") == {}
    assert foreign_text_colours(browser) == set()


@in_browser
@pytest.mark.parametrize(
    "name", ["bench whole", "bench 200 rows", "bench broken", "bench nystrom-table1", "sweep mixed", "sweep many"]
)
def test_tables_fit_on_paper(browser: Browser, pages: dict[str, Path], name: str) -> None:
    # A4 in landscape between its margins: 273 mm
    browser.open(pages[name], 1032, media="print")
    assert browser.evaluate("[...document.querySelectorAll('table')].every(e => e.scrollWidth <= innerWidth)")
    assert browser.evaluate(OVERFLOW) <= 0
