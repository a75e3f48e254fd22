"""Reports as pages: one self-contained file, no scripts, no network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effexport.base.runtimes import RUNTIMES
from effexport.base.units import counted, megabytes, memory, moment, number, seconds
from effexport.models.sources import SEED
from effexport.proof.check import Check, Kind, meaning_of, outcome_of, outcomes_text, summary
from effexport.render.templates import template_environment
from effexport.report.compare import Side
from effexport.report.problems import problems_of
from effexport.report.rendering.figures import error_figures
from effexport.report.rendering.quantization import layer_rows, quantization_facts
from effexport.report.rendering.text import (
    cases_text,
    data_name,
    field_text,
    figure_rows,
    flat_fields,
    limit_text,
    measures_text,
    share_of_limit,
    size_text,
    sizes,
)
from effexport.report.reproduce import REBUILT, build_command, verify_command

if TYPE_CHECKING:
    import jinja2

    from effexport.report.model import Report


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
        ("ONNX opset", str(report.spec["opset"])),
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
        "css": lambda status: status.replace(" ", "-"),
    }
    return template_environment(("report/rendering", "render"), filters)
