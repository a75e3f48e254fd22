"""The formats of a report, and the endings of file names that choose them: pages, Markdown, JUnit XML and JSON.

A page is one self-contained file, without scripts or network. Markdown is for pull requests. CI systems show JUnit XML:
a suite for each artifact, a case for each check.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from xml.etree import ElementTree

from effexport.artifact import REMEDY, REPORT_HTML, REPORT_JSON, check_output_file
from effexport.base.errors import UserError
from effexport.base.files import write_output
from effexport.base.formatting import counted, megabytes, memory, moment, number, seconds
from effexport.base.option_fields import optional_path
from effexport.base.records import record_from_values, values_of_file
from effexport.base.runtimes import RUNTIMES
from effexport.base.spec import opset_with
from effexport.models.sources import SEED
from effexport.plugins.ops import with_domain
from effexport.proof.check import Check, Kind, by_name, meaning_of, outcome_of, outcomes_text, summary
from effexport.quantize.record import Quantization
from effexport.render.formats import SIGNS, escaped, fenced, folded, indented, table, template_environment
from effexport.report.compare import Side, error_figures
from effexport.report.report import (
    PYTORCH,
    REPORT_VERSION,
    Report,
    ReportFile,
    SpecFields,
    report_from_file,
    with_built,
)
from effexport.report.reproduce import REBUILT, build_command, check_options, repeat_command, verify_command
from effexport.report.wording import (
    Problem,
    cases_text,
    data_name,
    field_text,
    figure_rows,
    flat_fields,
    layer_rows,
    limit_text,
    measures_text,
    problems_of,
    quality_text,
    quantization_facts,
    share_of_limit,
    size_text,
    sizes,
)
from effexport.tasks.figures import Quality

if TYPE_CHECKING:
    import jinja2

    from effexport.artifact import Artifact
    from effexport.report.verified import Verified


def html_from_report(side: Side, artifact: str = "") -> str:
    """The page of a report. artifact: how its commands name the artifact, if not by its name; "." is the folder that
    the page lies in."""
    report, artifact = side.report, artifact or side.name
    groups: dict[str, list[Check]] = {}
    for check in report.checks:
        groups.setdefault(check.name, []).append(check)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            name=side.name,
            opset=opset_of(report),
            built=built_facts(side),
            files={name: memory(size) for name, size in side.files.items()},
            runtime=RUNTIMES[report.runtime].label,
            runtimes=RUNTIMES,
            groups=groups,
            problems=problems_of(report.checks),
            summary=summary(report.checks),
            quality_rows=quality_rows(report),
            quantization_facts=quantization_facts(report.quantization) if report.quantization else [],
            layer_rows=layer_rows(report.quantization) if report.quantization else [],
            fields=flat_fields(report.spec),
            errors=error_figures(report),
            buckets=bucket_rows(report.checks),
            artifact=artifact,
            build_command=build_command(report, REBUILT),
            verify_command=lambda check: verify_command(check, report, artifact),
        )
    )


def opset_of(report: Report) -> int:
    return opset_with(report.spec.get("carrier", ""), report.spec["opset"])


def built_facts(side: Side) -> list[tuple[str, str]]:
    """The built model, its source, and the machine of its checks; unknown facts are left out."""
    report = side.report
    seed = f"drawn from seed {report.spec.get('seed', 0)}"
    place = [RUNTIMES[report.runtime].label, report.environment.get("processor")]
    rows = [
        ("Artifact", side.name),
        ("Model", report.title),
        ("Size", size_text(flat_fields(report.spec))),
        ("Weights", seed if report.weights_from == SEED else report.weights_from),
        ("Precision", report.spec["precision"]),
        ("ONNX opset", str(opset_of(report))),
        *(("Input", str(tensor)) for tensor in side.inputs),
        *(("Output", str(tensor)) for tensor in side.outputs),
        ("Checked in", ", ".join(part for part in place if part)),
    ]
    return [(name, value) for name, value in rows if value]


def quality_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """(figure, of the model, of PyTorch, difference) on the data of the report; none without data."""
    found = report.quality
    return [] if found is None else figure_rows(found.estimates, found.pytorch, found.differences)


def bucket_rows(checks: Sequence[Check]) -> list[tuple[Check, Check | None]]:
    """Per case: how many buckets differ, and how wide the widest margin of one is."""
    ties = {(check.target, check.case): check for check in checks if check.kind == Kind.BUCKET_NEAR_TIES}
    return [(check, ties.get((check.target, check.case))) for check in checks if check.kind == Kind.BUCKET_AGREEMENT]


@functools.cache
def _environment() -> jinja2.Environment:
    filters: dict[str, Any] = {
        "number": number,
        "measures": measures_text,
        "moment": moment,
        "limit_reason": limit_text,
        "outcome": outcome_of,
        "outcomes": outcomes_text,
        "cases": cases_text,
        "share": share_of_limit,
        "sizes": sizes,
        "data_name": data_name,
        "counted": counted,
        "field": field_text,
        "meaning": meaning_of,
        "megabytes": megabytes,
        "seconds": seconds,
        "with_domain": with_domain,
        "css": lambda status: status.replace(" ", "-"),
    }
    return template_environment(("report", "render"), filters)


def markdown_from_report(report: Report, artifact: str) -> str:
    """The verdict, a table of checks, every failure in full, notes. artifact: how its commands name the artifact."""
    parts = [
        f"### {SIGNS[report.verdict]} {escaped(report.title)}, {escaped(report.spec['precision'])}",
        escaped(report.sentence),
    ]
    problems = problems_of(report.checks)
    first = [f"* {escaped(report.divergence)}"] if report.divergence else []
    failed = [_problem(problem, report, artifact) for problem in problems if problem.outcome == "failed"]
    others = [_problem(problem, report, artifact) for problem in problems if problem.outcome != "failed"]
    parts += ["\n".join([*first, *failed])] if first or failed else []
    parts += [escaped(_facts(report)), _check_table(report.checks)]
    parts += [_quality(report.quality)] if report.quality else []
    parts += [_quantization(report.quantization)] if report.quantization else []
    parts += ["\n".join(others)] if others else []
    parts += ["\n".join(f"* {escaped(note)}" for note in report.notes)] if report.notes else []
    build = build_command(report, REBUILT)
    commands = "\n\n".join(filter(None, (repeat_command(report, artifact), build)))
    parts.append(folded("Check it again, build it again" if build else "Check it again", fenced(commands)))
    versions = [(name, version or "not installed") for name, version in report.environment.items()]
    parts.append(folded("Environment", table(("part", "version"), versions)))
    return "\n\n".join(parts) + "\n"


def _facts(report: Report) -> str:
    """One line: where it ran, and what ran the custom operators."""
    ran = [
        f"{with_domain(op)} {'not run' if how == 'not run' else f'as {how}'}"
        for op, how in report.implementation.items()
    ]
    engines = [engine.file for engine in report.engines]
    return "; ".join(
        [f"{RUNTIMES[report.runtime].label} against {report.reference}", *ran, *engines, moment(report.created)]
    )


def _check_table(checks: Sequence[Check]) -> str:
    rows = []
    groups = by_name(checks)
    for name, entry in summary(checks).items():
        group = groups[name]
        outcome = outcome_of(group)
        worst, limit = entry["worst"], entry["limit"]
        figures = (number(worst), number(limit), share_of_limit(worst, limit), cases_text(group))
        rows.append((name, f"{SIGNS[outcome]} {outcome}", entry["metric"], *figures))
    return table(("check", "result", "metric", "worst", "limit", "of limit", "passed"), rows, right=4)


def _quality(quality: Quality) -> str:
    rows = figure_rows(quality.estimates, quality.pytorch, quality.differences)
    head = ("figure", "model", "PyTorch", "difference, row by row")
    return f"{escaped(quality_text(quality))}\n\n{table(head, rows, right=3)}"


def _quantization(record: Quantization) -> str:
    layers = table(
        ("layer", "precision", "RMS error if it alone is quantised", "why it stays float"), layer_rows(record)
    )
    facts = table(("quantisation", ""), quantization_facts(record))
    return f"{facts}\n\n{folded('Every layer', layers)}"


def _problem(problem: Problem, report: Report, artifact: str) -> str:
    head = f"{SIGNS[problem.outcome]} **{problem.outcome}**: {escaped(problem.subject)}"
    text = f"* {head}: {escaped('; '.join(part for part in (problem.finding, limit_text(problem.worst)) if part))}"
    return f"{text}\n{indented(fenced(verify_command(problem.worst, report, artifact)))}"


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
    from effexport.report.report import json_from_report

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

    if output is not None:
        side = side_of_artifact(result.candidate.artifact, name, result.report)
        write_output(output, text_from_report(side, format_of_file(output)))
    return result


def report_of_artifact(artifact: Artifact) -> Report:
    """The report of an artifact whose files were checked, with what the manifest says: where the weights came from, and
    when and where it was built.

    Raises UserError where there is no report, where it is damaged, or where a newer effexport wrote it.
    """
    if REPORT_JSON not in artifact.manifest.files:
        raise UserError(f"{artifact.path} has no {REPORT_JSON}; {REMEDY}")
    file = artifact.path / REPORT_JSON
    values = _values_of_file(file)
    values["weights_from"] = artifact.manifest.weights_from
    report = report_from_values(values, file)
    if report.spec != artifact.manifest.spec:
        raise UserError(f"{file} is damaged: it describes another model than the manifest; {REMEDY}")
    return with_built(report, artifact.manifest)


def report_from_values(values: dict[str, Any], file: Path) -> Report:
    """The report of the plain values of a file, of the newest version. Raises UserError for values of another type."""
    report = record_from_values(values, ReportFile, str(file), REMEDY)
    check_options(report.options, file)
    record_from_values(report.spec, SpecFields, f"the spec in {file}", REMEDY)
    return report_from_file(report)


def side_of_artifact(artifact: Artifact, name: str, report: Report | None = None) -> Side:
    """The report of an artifact, its own or that of a verification, and what the artifact holds."""
    manifest = artifact.manifest
    sizes = {file: entry.bytes for file, entry in manifest.files.items() if file not in (REPORT_JSON, REPORT_HTML)}
    return Side(name, report or report_of_artifact(artifact), sizes, manifest.inputs, manifest.outputs)


def _values_of_file(file: Path) -> dict[str, Any]:
    """The fields of a report of any version that this effexport reads, as the newest version has them."""
    values = values_of_file(file, REMEDY)
    if type(values.get("report_version")) is not int:
        raise UserError(f"{file} is not a report of effexport: it has no report_version; {REMEDY}")
    version = values["report_version"]
    if version > REPORT_VERSION:
        raise UserError(
            f"{file} has report version {version}; this effexport reads up to {REPORT_VERSION}: upgrade effexport"
        )
    return _upgraded(values) if version < REPORT_VERSION else values


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no layers, no measurements, and less of each check; version 2 was of builds only; version 3 had
    no quality, and version 4 no quantization."""
    added: dict[str, Any] = {"layers": [], "bench": [], "weights_from": "", "divergence": "", "quality": None}
    values = {**added, "reference": PYTORCH, "options": [], **values, "report_version": REPORT_VERSION}
    of_check: dict[str, Any] = {"measures": {}, "worst": None, "seq_len": None, "histogram": []}
    if isinstance(values.get("checks"), list):
        values["checks"] = [of_check | check if isinstance(check, dict) else check for check in values["checks"]]
    return values
