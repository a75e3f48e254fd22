"""`effexport verify`."""

from __future__ import annotations

from pathlib import Path

import click

from effexport.commands._options import (
    common_options,
    implementation_text,
    precision_hint_option,
    result_console,
    runtime_options,
    say,
    stage_progress,
    stderr_console,
)
from effexport.commands._types import Named
from effexport.errors import Unavailable
from effexport.runtimes import ARTIFACT_RUNTIMES, RUNTIMES


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="ONNX file to check instead of the artifact's own.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="The weights that the artifact was built from: a checkpoint folder or a file.",
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
@click.option("--case", "cases", multiple=True, help="Check only this case, named as in the report. Repeatable.")
@click.option(
    "--trace", is_flag=True, help="Find the first value inside the graph that differs, even if no check fails."
)
@common_options
def command(
    artifact: Path,
    model: Path | None,
    weights: Path | None,
    runtime: str,
    implementation: str,
    precision_hint: str,
    reference: str,
    cases: tuple[str, ...],
    trace: bool,
    as_json: bool,
) -> None:
    """Check that a model computes what PyTorch computes: several shapes, padding, repetition, batch invariance.

    Exit status 1 if a check fails.
    """
    from effexport.cli import print_json
    from effexport.proof.references.choice import parse_choice
    from effexport.runners.artifact_runner import check_runtime
    from effexport.runners.runner import ModelOptions

    choice = parse_choice(reference)
    # cases have different shapes and up to two sessions are open, so memory is released after each run
    options = ModelOptions(implementation, memory_arena=False, precision_hint=precision_hint)
    check_runtime(runtime, options)
    from effexport.artifact import open_artifact
    from effexport.commands._checks import print_checks
    from effexport.environment import versions
    from effexport.proof.checks.result import passed, summary
    from effexport.proof.lost_parts import check_nothing_lost
    from effexport.proof.verify_artifact import Candidate, verify_artifact
    from effexport.report.model import dict_of_check
    from effexport.report.rendering.text import trace_text

    opened = open_artifact(artifact)
    if model is not None and not RUNTIMES[runtime].engine:
        check_nothing_lost(model, opened.spec)
    with stage_progress(stderr_console()) as on_stage:
        candidate = Candidate(opened, runtime, options, model)
        verification, found = verify_artifact(candidate, weights, choice, cases, trace, on_stage)
    checks = verification.checks
    ok = passed(checks)
    if as_json:
        print_json(
            {
                "artifact": str(artifact),
                "model": str(candidate.path),
                "reference": reference,
                "passed": ok,
                "runtime": runtime,
                "precision_hint": precision_hint or None,
                "implementation": verification.implementation,
                "environment": versions(),
                "summary": summary(checks),
                "checks": [dict_of_check(check) for check in checks],
                "trace": {"not_run": trace_text(found)}
                if isinstance(found, Unavailable)
                else found and found.to_dict(),
            }
        )
    console = result_console(as_json=as_json)
    print_checks(console, checks)
    if found is not None:
        say(console, trace_text(found))
    count = sum(check.status == "passed" for check in checks)
    verdict = f"{'equal' if ok else 'NOT proven equal'} to {choice.title}"
    if precision_hint:
        verdict += f" within the limits of {precision_hint}"
    ran = implementation_text(verification.implementation)
    say(console, f"{model or artifact}: {verdict}, {count} of {len(checks)} checks passed{ran}")
    if not ok:
        raise click.exceptions.Exit(1)
