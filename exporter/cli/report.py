"""`effexport report`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.artifact import check_output_file
from effexport.base.files import write_output
from effexport.base.formatting import say
from effexport.base.option_fields import A_FILE, Options, argument, option
from effexport.cli._console import result_console
from effexport.cli._verbs import verb
from effexport.report.formats import FORMAT_OF_SUFFIX, FORMATS, junit_from_reports, side_of_artifact, text_from_report

if TYPE_CHECKING:
    from effexport.report.compare import Comparison


@dataclass(frozen=True)
class ReportOptions(Options):
    """The options of `effexport report`."""

    artifact: Path | None = field(default=None, metadata=argument("An artifact folder."))
    other: Path | None = field(default=None, metadata=argument("An artifact folder to compare it with."))
    _: KW_ONLY
    form: str | None = option(
        None, "Default: by the suffix of -o, else markdown.", flag="--format", metavar="NAME", choices=FORMATS
    )
    output: Path | None = option(None, "File to write; default: stdout.", short="-o", metavar=A_FILE)
    force: bool = option(False, "Replace an existing file.")
    schema: bool = option(False, "Print the JSON Schema of report.json.")


@verb("report", ReportOptions)
def command(options: ReportOptions, as_json: bool) -> None:
    """Show the report of an artifact in another format, or compare two artifacts side by side.

    Reads report.json and measures nothing; use effexport verify to check a model again. The exit status does not depend
    on the verdict.
    """
    from effexport.base.errors import UserError
    from effexport.cli.main import print_answer, print_json

    artifact, output = options.artifact, options.output
    if output is not None:
        check_output_file(output, force=options.force)
    if options.schema:
        if artifact is not None or options.form is not None:
            raise UserError("--schema describes the reports of all artifacts; leave out the artifact and --format")
        from effexport.report.report import schema_text

        text, about = schema_text(), {"schema": "report.json"}
    else:
        if artifact is None:
            raise UserError("no artifact given; expected an artifact folder, such as: effexport report artifacts/lsh")
        form = chosen_format(options.form, output, as_json=as_json)
        text, about = rendering(artifact, options.other, form)
    if output is None:
        print_answer(text)
        return
    write_output(output, text)
    if as_json:
        print_json({"output": str(output), **about})
    say(result_console(as_json=as_json), f"{output}: written")


def chosen_format(form: str | None, output: Path | None, *, as_json: bool) -> str:
    """The format from --format or the file name. Raises UserError if it is unknown, or if stdout would be shared."""
    from effexport.base.errors import UserError

    if as_json and output is None:
        if form not in (None, "json"):
            raise UserError(f"--json and --format {form} would both print on stdout; add -o FILE")
        return "json"
    named = FORMAT_OF_SUFFIX.get(output.suffix.lower()) if output is not None else None
    if form is not None and named not in (None, form):
        raise UserError(f"--format {form} contradicts -o {output}, a file of the format {named}; leave out --format")
    if form is not None:
        return form
    if output is None or not output.suffix:
        return "markdown"
    if output.suffix.lower() not in FORMAT_OF_SUFFIX:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise UserError(f"{output}: the suffix does not name a format; expected one of {known}, or --format")
    return FORMAT_OF_SUFFIX[output.suffix.lower()]


def rendering(first: Path, second: Path | None, form: str) -> tuple[str, dict[str, Any]]:
    """The text of one report or of a comparison, and the fields that describe it for --json."""
    from effexport.artifact import open_artifact
    from effexport.report.compare import Comparison

    # tables call an artifact by its path, as it was given
    names = [str(path) for path in (first, second) if path is not None]
    sides = [side_of_artifact(open_artifact(Path(name)), name) for name in names]
    about: dict[str, Any] = {
        "format": form,
        "artifacts": names,
        "verdicts": [side.report.verdict for side in sides],
    }
    if form == "junit":
        return junit_from_reports([(side.name, side.report) for side in sides]), about
    if len(sides) == 1:
        return text_from_report(sides[0], form), about
    return comparison_text(Comparison(*sides), form), about


def comparison_text(comparison: Comparison, form: str) -> str:
    from effexport.base.files import json_text
    from effexport.render.formats import html_from_document, markdown_from_document
    from effexport.report.compare import document_from_comparison

    if form == "json":
        return json_text(comparison.to_dict())
    document = document_from_comparison(comparison)
    return html_from_document(document) if form == "html" else markdown_from_document(document)
