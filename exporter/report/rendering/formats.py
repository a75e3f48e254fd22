"""The formats of a report, and the endings of file names that choose them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from effexport.artifact import check_output_file
from effexport.base.errors import UserError
from effexport.base.files import write_output
from effexport.base.option_fields import optional_path

if TYPE_CHECKING:
    from effexport.report.compare import Side
    from effexport.report.verified import Verified

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


class WrittenOptions(Protocol):
    """Options that may name a file for the report."""

    @property
    def output(self) -> str | Path | None: ...

    @property
    def force(self) -> bool: ...


def checked_output(options: WrittenOptions) -> Path | None:
    """The file for the report. Raises UserError, before any work, for one that cannot be written."""
    output = optional_path("output", options.output)
    if output is not None:
        format_of_file(output)
        check_output_file(output, force=options.force)
    return output


def written(result: Verified, output: Path | None, name: str) -> Verified:
    """The result of a comparison, after writing its report if there is a file for it. name: of the model."""
    from effexport.report.reading import side_of_artifact

    if output is not None:
        side = side_of_artifact(result.candidate.artifact, name, result.report)
        write_output(output, text_from_report(side, format_of_file(output)))
    return result
