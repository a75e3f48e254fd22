"""The formats of a report, and the endings of file names that choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.report.compare import Side

FORMATS = ("html", "json", "markdown", "junit")
FORMAT_OF_SUFFIX = {".html": "html", ".htm": "html", ".json": "json", ".md": "markdown", ".xml": "junit"}


def text_from_report(side: Side, form: str) -> str:
    """One report in one of FORMATS."""
    from effexport.report.model import json_from_report
    from effexport.report.rendering.html import html_from_report
    from effexport.report.rendering.junit import junit_from_reports
    from effexport.report.rendering.markdown import markdown_from_report

    if form == "json":
        return json_from_report(side.report)
    if form == "html":
        return html_from_report(side)
    if form == "junit":
        return junit_from_reports([(side.name, side.report)])
    return markdown_from_report(side.report, side.name)
