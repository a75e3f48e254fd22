"""`effexport verify`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._options import (
    check_output_file,
    common_options,
    implementation_text,
    precision_hint_option,
    result_console,
    runtime_options,
    stage_progress,
    stderr_console,
    write_output,
)
from effexport.commands._types import Named
from effexport.environment import require_torch
from effexport.errors import Unavailable
from effexport.one_line import say
from effexport.runtimes import ARTIFACT_RUNTIMES

if TYPE_CHECKING:
    from effexport.proof.verify_artifact import VerifyRequest
    from effexport.report.model import Report


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="ONNX file to check instead of the artifact's own.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="The weights that the artifact was built from: a checkpoint folder or a file; with --module, its state_dict.",
)
@click.option(
    "--module",
    "factory",
    metavar="MODULE:FUNCTION",
    help="The module that the artifact was built from, named as for effexport build: PyTorch runs it again, on the "
    "stored inputs and on new ones.",
)
@runtime_options(ARTIFACT_RUNTIMES)
@precision_hint_option
@click.option(
    "--reference",
    type=Named(("auto", "golden", "torch", "transformers")),
    metavar="NAME|FILE|PATH@RUNTIME",
    default="auto",
    show_default=True,
    help="golden: stored answers, PyTorch is not needed. torch: the PyTorch module on new inputs. auto: both, if it "
    "is installed. transformers: the original model from --weights DIR. FILE.safetensors: answers stored elsewhere. "
    "PATH@RUNTIME: another artifact or ONNX file, such as other/artifact@ort.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Also compare the most probable answers with PyTorch's on this data, as `effexport evaluate` reads it.",
)
@click.option("--case", "cases", multiple=True, help="Check only this case, named as in the report. Repeatable.")
@click.option(
    "--trace", is_flag=True, help="Find the first value inside the graph that differs, even if no check fails."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Also write a report, whether the checks pass or fail: FILE.html, FILE.md, FILE.json or FILE.xml (JUnit).",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@common_options
def command(
    artifact: Path,
    model: Path | None,
    weights: Path | None,
    factory: str | None,
    runtime: str,
    implementation: str,
    device: int,
    precision_hint: str,
    reference: str,
    data: Path | None,
    cases: tuple[str, ...],
    trace: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Check that a model computes what PyTorch computes: several shapes, padding, repetition, batch invariance.

    Exit status 1 if a check fails, or if something that the options name was not compared.
    """
    from effexport.cli import print_json
    from effexport.proof.reference_choice import parse_choice
    from effexport.runners.artifact_runner import options_from_flags

    if factory is not None:
        require_torch("--module")
    choice = parse_choice(reference)
    # cases have different shapes and up to two sessions are open, so memory is released after each run
    options = options_from_flags(
        runtime, implementation=implementation, device=device, precision_hint=precision_hint, memory_arena=False
    )
    form = chosen_format(output, force=force)
    from effexport.artifact import open_artifact
    from effexport.commands._checks import print_checks
    from effexport.evaluation.evaluate import answer_checks
    from effexport.proof.check import passed, summary
    from effexport.proof.named_module import NamedModule, source_of_verify
    from effexport.proof.verify_artifact import ArtifactCandidate, VerifyRequest, verify_artifact
    from effexport.report.model import dict_of_check
    from effexport.report.reading import side_of_artifact
    from effexport.report.rendering.formats import text_from_report
    from effexport.report.rendering.text import quality_text, trace_text
    from effexport.report.verified import report_from_verification

    candidate = ArtifactCandidate(open_artifact(artifact), options, model)
    named = None if factory is None else NamedModule(factory, weights)
    source = source_of_verify(candidate.artifact, weights, named)
    request = VerifyRequest(choice, source, cases, trace, data)
    start = time.perf_counter()
    with stage_progress(stderr_console()) as on_stage:
        answers, quality = answer_checks(candidate, request, on_stage)
        verification, found = verify_artifact(candidate, request, on_stage)
    verification.checks += answers
    report = report_from_verification(candidate, request, verification, found, quality, time.perf_counter() - start)
    if output is not None:
        side = side_of_artifact(candidate.artifact, str(artifact), report)
        write_output(output, text_from_report(side, form))
    if as_json:
        print_json(
            {
                "artifact": str(artifact),
                "model": str(candidate.path),
                "reference": reference,
                "passed": passed(report.checks),
                "runtime": runtime,
                "precision_hint": precision_hint or None,
                "implementation": report.implementation,
                "environment": report.environment,
                "summary": summary(report.checks),
                "checks": [dict_of_check(check) for check in report.checks],
                "trace": {"not_run": trace_text(found)}
                if isinstance(found, Unavailable)
                else found and found.to_dict(),
                "quality": report.quality and asdict(report.quality),
                **({"output": str(output)} if output is not None else {}),
            }
        )
    console = result_console(as_json=as_json)
    print_checks(console, report.checks, report.divergence)
    if found is not None and not report.divergence and not trace:
        say(console, trace_text(found))
    if report.quality is not None:
        say(console, quality_text(report.quality))
    say(console, f"{model or artifact}: {verdict_text(report, request, precision_hint)}")
    if output is not None:
        say(console, f"{output}: written")
    if not passed(report.checks):
        raise click.exceptions.Exit(1)


def chosen_format(output: Path | None, *, force: bool) -> str:
    """The format of the report, by the name of its file. Raises UserError for a name that says none, or a file that may
    not be written."""
    from effexport.errors import UserError
    from effexport.report.rendering.formats import FORMAT_OF_SUFFIX

    if output is None:
        return ""
    form = FORMAT_OF_SUFFIX.get(output.suffix.lower())
    if form is None:
        raise UserError(f"-o {output}: expected a file name that ends in {', '.join(FORMAT_OF_SUFFIX)}")
    check_output_file(output, force=force)
    return form


def verdict_text(report: Report, request: VerifyRequest, precision_hint: str) -> str:
    """`equal to PyTorch, 35 checks passed, 1 not run`, and how the custom operators ran."""
    from effexport.proof.check import Kind, outcomes_text

    title = report.reference
    stored = any(check.kind == Kind.PYTORCH_MODULE for check in report.checks)
    if request.choice.kind == "golden" or (request.choice.kind == "auto" and stored):
        title = "PyTorch's stored answers"
    verdict = {"passed": "equal to", "failed": "NOT proven equal to", "not run": "NOT compared with"}[report.verdict]
    limits = f" within the limits of {precision_hint}" if precision_hint else ""
    ran = implementation_text(report.implementation)
    return f"{verdict} {title}{limits}, {outcomes_text(report.checks)}{ran}"
