"""Reports as JUnit XML, which CI systems show: a suite for each artifact, a case for each check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from effexport.base.units import number
from effexport.proof.check import Check
from effexport.report.model import Report
from effexport.report.rendering.text import limit_text, quality_text
from effexport.report.reproduce import verify_command

# What XML 1.0 cannot hold, not even as a reference.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_from_reports(reports: Sequence[tuple[str, Report]]) -> str:
    """XML of reports with the names of their artifacts."""
    root = ElementTree.Element("testsuites", name="effexport")
    for artifact, report in reports:
        root.append(_suite(artifact, report))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(artifact: str, report: Report) -> ElementTree.Element:
    counts = {"tests": len(report.checks), "failures": report.count("failed"), "errors": 0}
    suite = _element(
        "testsuite",
        name=f"{report.title} ({artifact})",
        **{name: str(count) for name, count in counts.items()},
        skipped=str(report.count("not run")),
        time=f"{sum(report.seconds.values()):.3f}",
        timestamp=report.created,
    )
    properties = ElementTree.SubElement(suite, "properties")
    subject = {"verdict": report.verdict, "reference": report.reference, "runtime": report.runtime}
    divergence = {"first divergence": report.divergence} if report.divergence else {}
    quality = {"quality": quality_text(report.quality)} if report.quality else {}
    facts = {**subject, **divergence, **quality, **report.implementation, **report.environment}
    for name, value in facts.items():
        properties.append(_element("property", name=name, value=value or "not installed"))
    for check in report.checks:
        suite.append(_case(check, report, artifact))
    return suite


def _case(check: Check, report: Report, artifact: str) -> ElementTree.Element:
    case = _element("testcase", classname=check.name, name=str(check.case))
    command = verify_command(check, report, artifact)
    if check.status == "not run":
        case.append(_element("skipped", message=check.reason or check.detail))
    elif check.status == "failed":
        value = f" {number(check.value)} > {number(check.limit)}" if check.value is not None else ""
        failure = _element("failure", type=check.name, message=f"{check.metric}{value}")
        failure.text = _clean("\n".join(part for part in (check.detail, limit_text(check), command) if part))
        case.append(failure)
    else:
        figures = {"value": check.value, "limit": check.limit, **check.measures}
        text = ", ".join(f"{name} {number(value)}" for name, value in figures.items() if value is not None)
        output = ElementTree.SubElement(case, "system-out")
        output.text = _clean("\n".join(part for part in (text, limit_text(check), command) if part))
    return case


def _element(tag: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.Element(tag, {name: _clean(value) for name, value in attributes.items()})


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
