"""`effexport verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._options import debug_option, json_option, stage_progress, stderr_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from effexport.artifact import Artifact
    from effexport.parity import Check


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Check this ONNX file instead of the artifact's own.")
@click.option("--runtime", default="ort", show_default=True, help="Runtime to check in: ort.")
@click.option(
    "--reference",
    default="auto",
    show_default=True,
    help="golden: the stored answers, without PyTorch. torch: the module, on new inputs. auto: both if torch is there.",
)
@json_option
@debug_option
def command(artifact: Path, model: Path | None, runtime: str, reference: str, as_json: bool, debug: bool) -> None:
    """Check that a model still computes what PyTorch computes: several shapes, padding, repetition, batch mates.

    Exit status 1 when a check fails.
    """
    from effexport.cli import print_json
    from effexport.errors import UserError
    from effexport.models.validation import did_you_mean

    for option, value, known in (
        ("--runtime", runtime, ("ort",)),
        ("--reference", reference, ("auto", "golden", "torch")),
    ):
        if value not in known:
            raise UserError(f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
    from effexport.artifact import open_artifact
    from effexport.commands._checks import print_checks
    from effexport.parity import passed, summary

    opened = open_artifact(artifact)
    console = stderr_console()
    with stage_progress(console) as on_stage:
        checks = verification_checks(opened, model or opened.model_path, reference, on_stage)
    ok = passed(checks)
    if as_json:
        print_json(
            {
                "artifact": str(artifact),
                "model": str(model or opened.model_path),
                "passed": ok,
                "implementation": dict.fromkeys(opened.manifest["custom_ops"], "body"),
                "summary": summary(checks),
                "checks": [check.to_dict() for check in checks],
            }
        )
    print_checks(console, checks)
    count = sum(check.status == "passed" for check in checks)
    verdict = "equal to PyTorch" if ok else "NOT proven equal to PyTorch"
    console.print(f"{model or artifact}: {verdict}, {count} of {len(checks)} checks passed", markup=False)
    if not ok:
        raise click.exceptions.Exit(1)


def verification_checks(
    artifact: Artifact, model: Path, reference: str, on_stage: Callable[[str], None]
) -> list[Check]:
    """Checks against the golden file, the PyTorch module, or both."""
    import importlib.util

    from effexport.artifact_from_spec import candidate_checks, decode_checks, module_checks
    from effexport.reference import load_reference

    spec, hashes = artifact.spec, artifact.manifest["hash_values"]
    checks: list[Check] = []
    if reference in ("auto", "golden"):
        on_stage("comparing with the golden file")
        cases = load_reference(artifact.reference_path)
        checks += candidate_checks(model, cases, spec, hashes)
        if model == artifact.model_path and spec.attention.has_decode_step:
            checks += decode_checks(artifact.decode_step_path, cases, spec)
    if reference == "torch" or (reference == "auto" and importlib.util.find_spec("torch") is not None):
        on_stage("comparing with PyTorch on new inputs")
        checks += module_checks(model, spec, hashes, artifact.manifest["weights_sha256"])
    return checks
