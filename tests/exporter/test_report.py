"""The report: one truth in JSON, one self-contained page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from effexport.artifact import Artifact
from effexport.parity import Check
from effexport.report import Report, flat_fields, html_from_report, json_from_report, number

GOOD = Check("arithmetic", "export: 1 × 64", "max |error| / RMS", "passed", 1.5e-6, 2e-5, "float32 sums")
BAD = Check("finite", "short: 2 × 7", "NaN or Inf elements", "failed", 3, 0, "no NaN", "worst at x[0, 1, 2]")
NOT_RUN = Check("parity", "all cases", "not measured", "not run", reason="no bfloat16 kernels here")


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
    text = html_from_report(report_of(*checks))
    assert not re.search(r"https?://|url\(|@import|javascript:", text)
    page = Page(text)
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert page.references == []


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.requires("native")
def test_a_real_page_shows_verdict_checks_and_versions(built: Callable[..., Artifact]) -> None:
    artifact = built("lsh", "encoder")
    text = (artifact.path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "link", "img"}
    assert page.references == []
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
    assert sentence in html_from_report(report)


def test_failures_are_shown_with_place_and_reason() -> None:
    text = html_from_report(report_of(GOOD, BAD))
    assert "worst at x[0, 1, 2]" in text
    assert "no NaN" in text
    assert text.count("<details open>") == 1


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b", "{{ 7 * 7 }}"])
def test_every_text_is_escaped(hostile: str) -> None:
    check = Check(hostile, hostile, hostile, "failed", 1, 0, hostile, hostile)
    report = report_of(check, title=hostile)
    report.spec["activation"] = hostile
    report.environment["torch"] = hostile
    report.implementation[hostile] = hostile
    text = html_from_report(report)
    page = Page(text)
    assert not page.tags & {"script", "img"}
    assert "49" not in re.sub(r"#\w+", "", text)


def test_the_json_report_holds_everything() -> None:
    report = report_of(GOOD, BAD, NOT_RUN)
    read = json.loads(json_from_report(report))
    assert [Check(**check) for check in read["checks"]] == [GOOD, BAD, NOT_RUN]
    assert read["spec"] == report.spec
    assert read["environment"] == report.environment
    assert read["seconds"] == {"exporting to ONNX": 1.235}
    assert read["report_version"] == 1
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
    report = report_of(Check("arithmetic", "export", "error", "failed", value, 2e-5))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(json_from_report(report), parse_constant=refuse)
    assert read["checks"][0]["value"] == str(value)
    assert str(value) in html_from_report(report)


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
