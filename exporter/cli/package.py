"""`effexport package`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.base.errors import UserError
from effexport.base.formatting import command_line, say
from effexport.base.option_fields import A_FILE, A_FOLDER, Option, argument, given, option, options_of
from effexport.cli._console import result_console
from effexport.cli._verbs import verb
from effexport.serving.triton.spec import PackageSpec

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.artifact import Artifact
    from effexport.serving.triton.package import PackageResult

CARD = "Options of card and hub"


@dataclass(frozen=True, kw_only=True)
class PackageOptions(PackageSpec):
    """The options of `effexport package`."""

    artifact: Path = field(metadata=argument("An artifact folder."))
    form: Literal["triton", "card", "hub"] = option("triton", "Package format.", flag="--format", metavar="NAME")
    output: Path = field(
        metadata={"option": Option("A model repository, or a new folder.", short="-o", metavar=A_FOLDER)}
    )
    name: str = option("", "Model name; default: the folder's.", metavar="NAME")
    no_warm_up: bool = option(False, "Skip the warm-up requests.")
    replace_config: bool = option(False, "Overwrite a hand-edited config.pbtxt.")
    license: str = option("", "Of the weights, such as apache-2.0.", CARD, metavar="NAME")
    quality: Path | None = option(None, "Result of effexport evaluate --json.", CARD, metavar=A_FILE)
    force: bool = option(False, "Replace the folder of a card.", CARD)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.artifact.resolve().name)
        object.__setattr__(self, "warm_up", not self.no_warm_up)
        super().__post_init__()
        for_triton = given(self, PackageSpec).keys() - {"name"} | {"no_warm_up", "replace_config"}
        others = for_triton if self.form != "triton" else {"license", "quality", "force"}
        if wrong := sorted(given(self, PackageOptions).keys() & others):
            flag = options_of(PackageOptions)[wrong[0]].flags[0]
            forms = "triton" if self.form != "triton" else "card or hub"
            raise UserError(f"{flag} only works with --format {forms}")


@verb("package", PackageOptions)
def command(options: PackageOptions, as_json: bool) -> None:
    """Add an artifact to a model repository of Triton Inference Server, or write its model card.

    triton: writes config.pbtxt and a numbered version, and next to the models a README, compose.yaml and a Dockerfile.
    Versions are never overwritten; packaging the same artifact again changes nothing.
    card: README.md with metadata of hubs, and a bill of materials in CycloneDX; hub: both with the artifact's files.
    """
    from effexport.artifact import open_artifact
    from effexport.cli.main import print_json
    from effexport.serving.triton.package import package_artifact

    artifact, replaces = open_artifact(options.artifact), options.replace_config
    if options.form != "triton":
        files = write_card_of(artifact, options)
        if as_json:
            print_json({"folder": str(options.output), "files": files})
        say(result_console(as_json=as_json), f"{options.output}: {', '.join(files)}; nothing was uploaded")
        return
    package = package_artifact(artifact, options.output, options, replace_config=replaces)
    if as_json:
        print_json(json_of_package(package))
    print_package(package, result_console(as_json=as_json))


def write_card_of(artifact: Artifact, options: PackageOptions) -> list[str]:
    from effexport.report.card import card_of_artifact, write_card

    card = card_of_artifact(artifact, options.name, options.license, options.quality)
    return write_card(card, options.output, with_model=options.form == "hub", force=options.force)


def json_of_package(package: PackageResult) -> dict[str, Any]:
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


def print_package(package: PackageResult, console: Console) -> None:
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
