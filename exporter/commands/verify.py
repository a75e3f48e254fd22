"""`effexport verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._options import (
    check_choice,
    debug_option,
    implementation_text,
    json_option,
    runtime_options,
    settings_from_options,
    stage_progress,
    stderr_console,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from effexport.artifact import Artifact
    from effexport.runners.ort_session import OrtSettings
    from effexport.verification import Verification


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Check this ONNX file instead of the artifact's own.")
@click.option(
    "--weights", type=click.Path(path_type=Path), help="What it was built from: a checkpoint folder, or a file."
)
@runtime_options
@click.option(
    "--reference",
    default="auto",
    show_default=True,
    help="golden: the stored answers, without PyTorch. torch: the module, on new inputs. auto: both if torch is there.",
)
@json_option
@debug_option
def command(
    artifact: Path,
    model: Path | None,
    weights: Path | None,
    runtime: str,
    implementation: str,
    reference: str,
    as_json: bool,
    debug: bool,
) -> None:
    """Check that a model still computes what PyTorch computes: several shapes, padding, repetition, batch mates.

    Exit status 1 when a check fails.
    """
    from effexport.cli import print_json

    check_choice("--reference", reference, ("auto", "golden", "torch"))
    settings = settings_from_options(runtime, implementation)
    from effexport.artifact import open_artifact
    from effexport.commands._checks import print_checks
    from effexport.environment import versions
    from effexport.parity import passed, summary

    opened = open_artifact(artifact)
    console = stderr_console()
    with stage_progress(console) as on_stage:
        verification = verify_artifact(opened, model or opened.model_path, weights, reference, settings, on_stage)
    checks = verification.checks
    ok = passed(checks)
    if as_json:
        print_json(
            {
                "artifact": str(artifact),
                "model": str(model or opened.model_path),
                "passed": ok,
                "runtime": runtime,
                "implementation": verification.implementation,
                "environment": versions(),
                "summary": summary(checks),
                "checks": [check.to_dict() for check in checks],
            }
        )
    print_checks(console, checks)
    count = sum(check.status == "passed" for check in checks)
    verdict = "equal to PyTorch" if ok else "NOT proven equal to PyTorch"
    ran = implementation_text(verification.implementation)
    console.print(
        f"{model or artifact}: {verdict}, {count} of {len(checks)} checks passed{ran}", markup=False, soft_wrap=True
    )
    if not ok:
        raise click.exceptions.Exit(1)


def verify_artifact(
    artifact: Artifact,
    model: Path,
    weights: Path | None,
    reference: str,
    settings: OrtSettings,
    on_stage: Callable[[str], None],
) -> Verification:
    """Checks against the golden file, the PyTorch module, or both."""
    import importlib.util

    from effexport.reference import load_reference
    from effexport.verification import Verification, verify_against_module, verify_candidate, verify_decode_step

    spec, hashes = artifact.spec, artifact.manifest["hash_values"]
    result = Verification()
    if reference in ("auto", "golden"):
        on_stage("comparing with the golden file")
        cases = load_reference(artifact.reference_path)
        result += verify_candidate(model, cases, spec, hashes, settings)
        if model == artifact.model_path and spec.has_decode_step:
            result += verify_decode_step(artifact.decode_step_path, cases, spec, settings)
    if reference == "torch" or (reference == "auto" and importlib.util.find_spec("torch") is not None):
        on_stage("comparing with PyTorch on new inputs")
        result += verify_against_module(model, artifact, weights, settings)
    return result
