"""The report of a build: `report.json` is the truth; the page, Markdown and JUnit XML are its renderings."""

from __future__ import annotations

from effexport.report.model import REPORT_VERSION, Report, json_from_report
from effexport.report.rendering.html import html_from_report
from effexport.report.rendering.text import flat_fields, sizes

__all__ = [
    "REPORT_VERSION",
    "Report",
    "flat_fields",
    "html_from_report",
    "json_from_report",
    "sizes",
]
