"""`effexport build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import (
    debug_option,
    implementation_text,
    json_option,
    runtime_options,
    settings_from_options,
    stage_progress,
    stderr_console,
)

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.report import Report


@click.command("build")
@click.option("--variant", help="Attention variant; see: effexport list.")
@click.option("--scope", help="encoder (default) or attention: a whole encoder, or one attention layer.")
@click.option("--dim", type=int, help="Model width.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--layers", type=int, help="Encoder blocks.")
@click.option("--seq-len", type=int, help="Length to export and tune for, in tokens.")
@click.option("--batch", type=int, help="Batch size of the export case of the parity check.")
@click.option("--causal/--no-causal", default=None, help="Hide later positions.")
@click.option("--precision", help="fp32 (default), fp16 or bf16; sensitive parts stay in float32.")
@click.option("--opset", type=int, help="ONNX opset, 18 to 24.")
@click.option("--seed", type=int, help="Seed of the weights.")
@click.option("--external-data/--no-external-data", default=None, help="Keep weights in model.onnx.data.")
@click.option("--spec", "spec_file", type=click.Path(path_type=Path), help="TOML file with any field of the spec.")
@runtime_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write; default artifacts/VARIANT.")
@click.option("--force", is_flag=True, help="Replace an existing artifact.")
@json_option
@debug_option
def command(
    spec_file: Path | None,
    runtime: str,
    implementation: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    debug: bool,
    **flags: Any,
) -> None:
    """Export a model to ONNX, check it against PyTorch and write an artifact folder.

    Flags win over the fields of --spec. Nothing is written unless every check passes. --runtime and --implementation
    say where the check runs the model; the model is the same.
    """
    from effexport.artifact import check_output
    from effexport.cli import print_json
    from effexport.spec import build_spec_from_options

    spec = build_spec_from_options(flags, spec_file)
    settings = settings_from_options(runtime, implementation)
    output = output or Path("artifacts") / spec.variant
    check_output(output, force=force)
    from effexport.artifact_from_spec import artifact_from_spec

    console = stderr_console()
    with stage_progress(console) as on_stage:
        artifact, report = artifact_from_spec(spec, output, settings=settings, force=force, on_stage=on_stage)
    if as_json:
        answer = {"artifact": str(output), "verdict": report.verdict, "implementation": report.implementation}
        print_json(answer | artifact.manifest)
    print_result(artifact, report)


def print_result(artifact: Artifact, report: Report) -> None:
    from effexport.commands._checks import print_checks

    console = stderr_console()
    print_checks(console, report.checks)
    seconds = sum(report.seconds.values())
    model_bytes = sum(entry["bytes"] for name, entry in artifact.manifest["files"].items() if "model.onnx" in name)
    console.print(
        f"{artifact.path}: {report.title}, {artifact.spec.precision}, {model_bytes / 1e6:.1f} MB, "
        f"built in {seconds:.0f} s{implementation_text(report.implementation)}. "
        f"Next: effexport verify {artifact.path}, or open {artifact.path}/report.html",
        soft_wrap=True,
        markup=False,
    )
