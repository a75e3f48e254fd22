"""The formats of a report, and the endings of file names that choose them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.errors import UserError

if TYPE_CHECKING:
    from effexport.report.compare import Side

FORMATS = ("html", "json", "markdown", "junit")
FORMAT_OF_SUFFIX = {".html": "html", ".htm": "html", ".json": "json", ".md": "markdown", ".xml": "junit"}


def format_of_file(file: Path) -> str:
    """The format of a report, by the name of its file. Raises UserError for a name that says none."""
    form = FORMAT_OF_SUFFIX.get(file.suffix.lower())
    if form is None:
        raise UserError(f"-o {file}: expected a file name that ends in {', '.join(FORMAT_OF_SUFFIX)}")
    return form


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
