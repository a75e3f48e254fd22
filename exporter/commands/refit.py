"""`effexport refit`."""

from __future__ import annotations

from pathlib import Path

import click

from effexport.commands._help import HelpfulCommand
from effexport.commands._options import (
    common_options,
    result_console,
    runtime_options,
    settings_from_options,
    stage_progress,
    stderr_console,
)
from effexport.commands._result import print_result
from effexport.environment import require_torch
from effexport.runtimes import ORT_RUNTIMES

EXAMPLES = (
    "effexport refit artifacts/lsh --weights epoch2.safetensors            # replaces artifacts/lsh",
    "effexport refit artifacts/lsh --weights epoch2.safetensors -o artifacts/epoch2",
    "effexport refit artifacts/reformer --checkpoint DIR                   # of the same architecture",
    "effexport refit artifacts/mine --module my_model:make                 # your own module, with other weights",
)


@click.command("refit", cls=HelpfulCommand, examples=EXAMPLES)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="safetensors file with weights for the variant, as for effexport build; with --module, its state_dict.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkpoint with the architecture of the one that the artifact was built from.",
)
@click.option(
    "--module",
    "factory",
    metavar="MODULE:FUNCTION",
    help="The module of your own that the artifact was built from, with other weights; named as for effexport build.",
)
@runtime_options(ORT_RUNTIMES)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder to write; default: the artifact itself is replaced.",
)
@click.option("--force", is_flag=True, help="Replace an existing artifact at -o.")
@common_options
def command(
    artifact: Path,
    weights: Path | None,
    checkpoint: Path | None,
    factory: str | None,
    runtime: str,
    implementation: str,
    device: int,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Put other weights of the same architecture into an artifact, without exporting it again.

    The graphs are those that were traced for the artifact, or the same again of a module of your own; the files are
    those that a build from these weights would write. PyTorch with the new weights is the reference of the same checks
    as in a build. Engines are refitted or built again. If anything fails, the old artifact stays as it is.
    """
    from effexport.cli import print_json

    require_torch("effexport refit")
    settings = settings_from_options(runtime, implementation, device)
    from effexport.artifact import open_artifact
    from effexport.build import artifact_from_refit
    from effexport.proof.named_module import NamedModule
    from effexport.refit_request import RefitRequest

    named = None if factory is None else NamedModule(factory, weights)
    request = RefitRequest(open_artifact(artifact), weights, checkpoint, output, force, named)
    with stage_progress(stderr_console()) as progress:
        refitted, report = artifact_from_refit(request, settings=settings, on_stage=progress, on_progress=progress.step)
    if as_json:
        import msgspec

        answer = {"artifact": str(refitted.path), "verdict": report.verdict, "implementation": report.implementation}
        print_json(answer | msgspec.to_builtins(refitted.manifest))
    print_result(result_console(as_json=as_json), refitted, report, "refitted")
