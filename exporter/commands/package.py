"""`effexport package`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import common_options, result_console
from effexport.commands._types import OneOf
from effexport.one_line import say
from effexport.runners.options import IMPLEMENTATIONS
from effexport.serving.triton.spec import BACKENDS
from effexport.shell import command_line

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.serving.triton.package import Package

FORMATS = ("triton",)


@click.command("package")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--format", type=OneOf(FORMATS), default="triton", show_default=True, expose_value=False, help="Package format."
)
@click.option(
    "-o",
    "--output",
    "repository",
    type=click.Path(path_type=Path),
    required=True,
    help="Model repository to add to; created if missing.",
)
@click.option(
    "--backend",
    "backends",
    type=OneOf(BACKENDS),
    multiple=True,
    help="Triton backend; python is effexport's own runner. Repeatable.  [default: all that the artifact has files "
    "for]",
)
@click.option(
    "--name", help="Model name; with several backends, NAME-BACKEND for each.  [default: the artifact's folder]"
)
@click.option("--version", type=int, help="Version number.  [default: the next free one]")
@click.option(
    "--max-batch", type=int, help="Largest batch, in rows, or in texts that are generated.  [default: 8; 64 texts]"
)
@click.option(
    "--preferred-batch",
    help="Batch sizes that run without further waiting, such as 4,8,16.  [default: --max-batch and half of it]",
)
@click.option("--queue-delay-us", type=int, help="Microseconds that a request waits for others.  [default: 500]")
@click.option("--max-queue", type=int, help="Requests that may wait; 0: no limit.  [default: 0]")
@click.option("--instances", type=int, help="Copies of the model that run at the same time.  [default: 1]")
@click.option("--kind", type=OneOf(("cpu", "gpu")), help="Where the model runs.  [default: gpu for tensorrt, else cpu]")
@click.option("--threads", type=int, help="ONNX Runtime threads per instance.  [default: all cores]")
@click.option(
    "--implementation",
    type=OneOf(IMPLEMENTATIONS),
    help="How custom operators run: as kernels, as function bodies, or auto: as kernels if they are built.  "
    "[default: auto]",
)
@click.option("--no-warm-up", is_flag=True, help="Skip the warm-up requests.")
@click.option("--live-versions", type=int, help="How many of the newest versions are served.  [default: 1]")
@click.option("--server-path", help="Path of the repository on the server.  [default: /models]")
@click.option("--image-tag", help="Tag of the tritonserver image in compose.yaml and Dockerfile.")
@click.option("--replace-config", is_flag=True, help="Overwrite a hand-edited config.pbtxt.")
@common_options
def command(
    artifact: Path,
    repository: Path,
    backends: tuple[str, ...],
    name: str | None,
    preferred_batch: str | None,
    no_warm_up: bool,
    replace_config: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Add an artifact to a model repository of Triton Inference Server.

    Writes config.pbtxt and a numbered version, and next to the models a README, compose.yaml and a Dockerfile. Versions
    are never overwritten; packaging the same artifact again changes nothing.
    """
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.serving.triton.package import package_artifact
    from effexport.serving.triton.spec import PackageSpec

    given = {name: value for name, value in options.items() if value is not None}
    spec = PackageSpec(
        name=name if name is not None else artifact.resolve().name,
        backends=backends,
        preferred_batch=sizes_from_text(preferred_batch),
        warm_up=not no_warm_up,
        **given,
    )
    package = package_artifact(open_artifact(artifact), repository, spec, replace_config=replace_config)
    if as_json:
        print_json(json_of_package(package))
    print_package(package, result_console(as_json=as_json))


def sizes_from_text(text: str | None) -> tuple[int, ...]:
    """`4,8,16` → sizes. Raises UserError for anything else."""
    from effexport.errors import UserError

    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UserError(f"--preferred-batch is {text!r}; expected sizes with commas between them, such as 4,8,16")
    return tuple(map(int, words))


def json_of_package(package: Package) -> dict[str, Any]:
    return {
        "repository": str(package.repository),
        "models": [
            {
                "name": change.name,
                "backend": change.record.backend,
                "version": change.version,
                "status": change.status,
                "max_batch": change.record.max_batch,
                "path": str(package.repository / change.name),
            }
            for change in package.changes
        ],
        "serve": list(package.serve),
        "remarks": list(package.remarks),
    }


def print_package(package: Package, console: Console) -> None:
    sentences = {
        "added": "version {} added",
        "configured": "version {} already exists; its configuration was updated",
        "unchanged": "version {} already exists; nothing was written",
    }
    for change in package.changes:
        path = package.repository / change.name
        say(console, f"{path}: {sentences[change.status].format(change.version)}")
    for remark in package.remarks:
        say(console, f"note: {remark}")
    serve = command_line("docker", "compose", "-f", package.repository / "compose.yaml", "up", "--build")
    say(
        console,
        f"To serve it: {serve}; {package.repository / 'README.md'} has more",
    )
