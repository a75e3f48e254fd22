"""The report: one truth in JSON, one self-contained page."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from effexport.artifact import Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.formatting import number
from effexport.proof.check import ALL_CASES, CaseLabel, Check, Kind, function_body_of, meaning_of
from effexport.render.formats import html_from_document
from effexport.render.svg import Axis, Point, Series, dots, histogram, legend_of, scatter
from effexport.report.compare import Comparison, Side, document_from_comparison, error_figures
from effexport.report.formats import html_from_report, report_from_values
from effexport.report.report import LayerError, Report, json_from_report
from effexport.report.wording import flat_fields

GOOD = Check("arithmetic", CaseLabel("export", (1, 64)), "max |error| / RMS", "passed", 1.5e-6, 2e-5, "float32 sums")
BAD = Check(
    "finite", CaseLabel("short", (2, 7)), "NaN or Inf elements", "failed", 3, 0, "no NaN", "worst at x[0, 1, 2]"
)
NOT_RUN = Check("parity", ALL_CASES, "not measured", "not run", reason="no bfloat16 kernels here")


def report_of(*checks: Check, title: str = "lsh encoder") -> Report:
    return Report(
        title=title,
        spec={"precision": "fp32", "opset": 20, "model": {"attention": {"variant": "lsh", "num_buckets": None}}},
        checks=list(checks),
        environment={"effexport": "0.1.0", "torch": "2.9.9", "onnxruntime": None},
        created="2026-01-02T03:04:05+00:00",
        seconds={"exporting to ONNX": 1.23456},
        implementation={"LSHSort": "body"},
    )


def page_of(report: Report) -> str:
    ids = TensorInfo("input_ids", "int64", ("batch", "seq"))
    return html_from_report(Side("artifacts/lsh", report, {"model.onnx": 512_000}, (ids,), (ids,)))


class Page(HTMLParser):
    """Tags that are opened and closed, and everything that they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action")]
        if tag not in ("meta", "br", "img", "link", "hr", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("checks", [(GOOD,), (GOOD, BAD), (NOT_RUN,), ()])
def test_the_page_is_self_contained_and_well_formed(checks: tuple[Check, ...]) -> None:
    text = page_of(report_of(*checks))
    assert not re.search(r"https?://|url\(|@import|javascript:", text)
    page = Page(text)
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert [reference for reference in page.references if not reference.startswith("#")] == []


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.requires("native")
def test_a_real_page_shows_verdict_checks_and_versions(built: Callable[..., Artifact]) -> None:
    artifact = built("lsh", "encoder")
    text = (artifact.path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "link", "img"}
    assert all(reference.startswith("#") for reference in page.references)
    assert "Passed: the exported model computes what PyTorch computes" in text
    report = json.loads((artifact.path / "report.json").read_text())
    assert {"signature", "finite", "repeatable", "batch invariance", "bucket agreement"} <= report["summary"].keys()
    for name in report["summary"]:
        assert name in text
    for name in ("torch", "onnx", "onnxruntime", "effexport"):
        assert report["environment"][name] in text
    assert "effexport::LSHSort" in text
    assert "ran as kernel" in text


@pytest.mark.parametrize(
    ("checks", "verdict", "sentence"),
    [
        ((GOOD,), "passed", "Passed: the exported model computes"),
        ((GOOD, NOT_RUN), "passed", "Passed: the exported model computes"),
        ((GOOD, BAD), "failed", "Failed: the exported model does not compute"),
        ((BAD, NOT_RUN), "failed", "Failed: the exported model does not compute"),
        ((NOT_RUN,), "not run", "Not run: the exported model was not compared"),
        ((), "not run", "Not run: the exported model was not compared"),
    ],
)
def test_the_verdict_is_the_worst_that_happened(checks: tuple[Check, ...], verdict: str, sentence: str) -> None:
    report = report_of(*checks)
    assert report.verdict == verdict
    assert json.loads(json_from_report(report))["verdict"] == verdict
    assert sentence in page_of(report)


def test_the_page_names_the_artifact_its_files_inputs_and_processor() -> None:
    report = report_of(GOOD)
    report.environment["processor"] = "A processor"
    text = page_of(report)
    assert "<h1>Report of artifacts/lsh: lsh encoder</h1>" in text
    for name, value in (
        ("model.onnx", "512 kB"),
        ("Input", "input_ids int64 [batch, seq]"),
        ("Checked in", "ONNX Runtime on the CPU, A processor"),
    ):
        assert f'<th scope="row">{name}</th><td>{value}</td>' in text


def test_every_kind_of_check_has_a_sentence_of_its_own_that_the_page_shows() -> None:
    meanings = [kind.meaning for kind in Kind] + [meaning_of(function_body_of("LSHSort"))]
    assert len(set(meanings)) == len(Kind) + 1
    assert all(text.endswith(".") and len(text) < 100 for text in meanings)
    text = html.unescape(page_of(report_of(*(dataclasses.replace(GOOD, kind=kind, target="trt-rtx") for kind in Kind))))
    assert all(kind.meaning in text for kind in Kind)
    assert meaning_of("a check of another release") == ""


def test_failures_are_shown_with_place_and_reason() -> None:
    text = page_of(report_of(GOOD, BAD))
    assert "worst at x[0, 1, 2]" in text
    assert "no NaN" in text
    assert text.count("<details open>") == 1


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b", "{{ 7 * 7 }}"])
def test_every_text_is_escaped(hostile: str) -> None:
    check = Check(hostile, CaseLabel(hostile), hostile, "failed", 1, 0, hostile, hostile)
    report = report_of(check, title=hostile)
    report.spec["activation"] = hostile
    report.environment["torch"] = hostile
    report.implementation[hostile] = hostile
    text = page_of(report)
    page = Page(text)
    assert not page.tags & {"script", "img"}
    assert "49" not in re.sub(r"#\w+", "", text)


def test_the_json_report_holds_everything() -> None:
    report = report_of(GOOD, BAD, NOT_RUN)
    read = json.loads(json_from_report(report))
    assert report_from_values(read, Path("report.json")) == dataclasses.replace(
        report, seconds={"exporting to ONNX": 1.235}
    )
    assert read["spec"] == report.spec
    assert read["environment"] == report.environment
    assert read["seconds"] == {"exporting to ONNX": 1.235}
    assert read["report_version"] == 5
    assert read["summary"]["arithmetic"] == {
        "passed": 1,
        "failed": 0,
        "not run": 0,
        "worst": 1.5e-6,
        "limit": 2e-5,
        "metric": "max |error| / RMS",
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_result_that_is_no_number_can_be_reported(value: float) -> None:
    report = report_of(Check("arithmetic", CaseLabel("export"), "error", "failed", value, 2e-5))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(json_from_report(report), parse_constant=refuse)
    assert read["checks"][0]["value"] == str(value)
    assert str(value) in page_of(report)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0, "0"),
        (17, "17"),
        (1.5e-6, "1.5e-06"),
        (0.25, "0.25"),
        (2e-5, "2e-05"),
        (123456789.0, "1.2e+08"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_nested_spec_becomes_one_table() -> None:
    assert flat_fields({"a": 1, "model": {"attention": {"dim": 2}, "layers": 3}}) == {"a": 1, "dim": 2, "layers": 3}


# ---- plots


def parsed(svg: str) -> ElementTree.Element:
    """A plot, which must be well-formed and have a name and a description."""
    root = ElementTree.fromstring(svg)
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert root.find("title") is not None
    assert root.find("desc") is not None
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter("text")]


@pytest.mark.parametrize("values", [[1e-6], [0.0], [0.0, 0.0], [math.nan], [math.inf, 1.0], [1e-30, 1e30], [-1.0, 2.0]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_any_values_can_be_plotted(values: list[float], logarithmic: bool) -> None:
    points = [Point(n + 1, value, "<&>") for n, value in enumerate(values)]
    series = [Series("s", points, limits=points)]
    rows = [Series("s", [Point(point.y, point.x - 1, "<&>") for point in points], "marks")]
    for svg in (
        scatter("k", "a < b", "c & d", Axis("x", True), Axis("y", logarithmic), series),
        dots("k", "a < b", "c & d", Axis("x", logarithmic), ["<&>"] * len(values), rows),
    ):
        for element in parsed(svg).iter():
            for name, value in element.items():
                assert "nan" not in value, (name, value)
                assert "inf" not in value, (name, value)
    names = [entry.name for entry in legend_of(series)]
    assert ("NaN or infinite" in names) == (not all(map(math.isfinite, values)))


def test_a_larger_value_is_higher_up() -> None:
    points = [Point(1, 0.0), Point(2, 1e-7), Point(4, 1e-3)]
    root = parsed(scatter("k", "t", "d", Axis("x", True), Axis("y", True), [Series("s", points, "marks")]))
    heights = [float(circle.get("cy", "")) for circle in root.iter("circle")][: len(points)]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == len(points)
    assert "0" in texts(root)


def test_a_limit_has_the_colour_of_its_series_and_lies_beside_those_of_others() -> None:
    series = [Series(name, [Point(1, 1e-6)], "marks", [Point(1, 1e-4)]) for name in "ab"]
    root = parsed(scatter("k", "t", "d", Axis("x", True), Axis("y", True), series))
    bars = {group.get("class"): group.findall("path[@class='limit']") for group in root.findall("g")}
    assert {css: len(found) for css, found in bars.items()} == {"s0": 1, "s1": 1}
    places = [float(found[0].get("d", "")[1:].split()[0]) for found in bars.values()]
    assert abs(places[0] - places[1]) >= 10
    assert all('class="limit"' in entry.sign for entry in legend_of(series))


def test_series_differ_in_more_than_colour() -> None:
    series = [Series(f"s{n}", [Point(1, n + 1), Point(2, n + 2)]) for n in range(12)]
    root = parsed(scatter("k", "t", "d", Axis("x"), Axis("y"), [*series, Series("softmax", [Point(1, 1)], "baseline")]))
    looks = set()
    for group in root.iter("g"):
        line = group.find("path[@class='line']")
        if line is not None and group.get("class", "").startswith("s"):
            mark = next(element for element in group.iter() if element.tag in ("circle", "rect", "path"))
            looks.add((group.get("class"), line.get("stroke-dasharray"), mark.tag))
    assert len(looks) == 12


def test_a_histogram_has_a_bar_for_each_decade_with_elements() -> None:
    root = parsed(histogram("k", "t", "d", "x", ["1e-1", "1"], [5, 0, 1_200_000], 1.5))
    assert len(list(root.iter("rect"))) == 2
    assert {"5", "1.2M", "limit", "1e-1"} <= set(texts(root))


def measured_check(seq_len: int, value: float, **fields: object) -> Check:
    return dataclasses.replace(GOOD, case=CaseLabel("c", (1, seq_len)), seq_len=seq_len, value=value, **fields)  # type: ignore[arg-type]


def test_plots_are_made_of_what_is_there() -> None:
    assert error_figures(report_of(GOOD, BAD, NOT_RUN)) == []
    # one length is not a curve, and without any error there is no plot
    assert error_figures(report_of(measured_check(64, 1e-6))) == []
    assert error_figures(report_of(measured_check(64, 0.0), measured_check(128, 0.0))) == []
    (figure,) = error_figures(report_of(measured_check(64, 1e-6), measured_check(128, math.nan)))
    assert "Largest: nan in arithmetic (c: 1 × 128), limit 2e-05" in figure.caption
    counts = (0,) * 4 + (7, 0, 2) + (0,) * 4
    (figure,) = error_figures(report_of(measured_check(64, 1e-6, histogram=counts)))
    assert "9 elements of all cases; the 2 with the largest errors are below 0.001" in figure.caption.replace(
        "1e-3", "0.001"
    )
    report = dataclasses.replace(report_of(GOOD), layers=[LayerError(layer="a.b", op_type="Add", error=1e-6)])
    (figure,) = error_figures(report)
    assert "Largest: 1e-06 in a.b (Add)" in figure.caption
    assert "<code>a.b</code>" in page_of(report)


def comparison_page(first: Side, second: Side) -> str:
    return html_from_document(document_from_comparison(Comparison(first, second)))


def test_a_comparison_says_what_it_is_and_plots_errors_sizes_and_times() -> None:
    first = Side("old", report_of(GOOD), {"model.onnx": 1_000_000})
    second = Side("new", report_of(dataclasses.replace(GOOD, value=3e-6), NOT_RUN), {"model.onnx": 2_000_000})
    text = comparison_page(first, second)
    assert "<h1>Comparison of two artifacts: old and new</h1>" in text
    titles = re.findall(r"<figure><h3>([^<]+)</h3>", text)
    assert titles == ["Worst error of each check", "Size of each file", "Time of each stage of the build"]
    assert "<title>new, model.onnx: 2 MB</title>" in text
    assert "× 2<" in text
    assert "Different models" not in text
    other = dataclasses.replace(second, report=dataclasses.replace(second.report, title="other"))
    assert "Different models, " in comparison_page(first, other)
    # what neither side has is not plotted
    bare = Side("bare", dataclasses.replace(report_of(NOT_RUN), seconds={}))
    assert "<figure>" not in comparison_page(bare, bare)
