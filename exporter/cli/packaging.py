"""Commands that write an artifact for other tools: inline, package."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.artifact import check_output_file
from effexport.base.errors import UserError
from effexport.base.formatting import command_line, megabytes, say
from effexport.base.option_fields import A_FILE, A_FOLDER, Option, Options, argument, given, option, options_of
from effexport.cli._console import result_console, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.serving.triton.spec import PackageSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from effexport.artifact import Artifact
    from effexport.proof.check import Check
    from effexport.serving.triton.package import PackageResult


STAGE = "inline"


@dataclass(frozen=True)
class InlineOptions(Options):
    """The options of `effexport inline`."""

    artifact: Path = field(metadata=argument("An artifact folder."))
    _: KW_ONLY
    output: Path = field(metadata={"option": Option("ONNX file to write.", short="-o", metavar=A_FILE)})
    force: bool = option(False, "Replace an existing file.")


@verb("inline", InlineOptions)
def inline_command(options: InlineOptions, as_json: bool) -> None:
    """Write the model of an artifact with standard operators only, for tools that know no model-local functions.

    The definition of each custom operator takes the place of the operator. The file is compared with the stored answers
    of PyTorch, as by effexport verify --model, and written only if every check passes. External weights go into a
    second file, OUTPUT.data; one that the model does not need is left as it is. To build such a model in the first
    place, use effexport build --inline.
    """
    from effexport.artifact import open_artifact
    from effexport.cli.main import print_json
    from effexport.proof.check import passed, summary
    from effexport.report.report import dict_of_check

    output = options.output
    opened = open_artifact(options.artifact)
    check_outputs(opened, output, force=options.force)
    with stage_progress(stderr_console()) as on_stage:
        written = write_inlined(opened, output, on_stage, force=options.force)
    if as_json:
        print_json(
            {
                "artifact": str(options.artifact),
                "output": str(output),
                "files": list(map(str, written.files)),
                "bytes": written.bytes,
                "opset": opened.spec.opset_of_file,
                "nodes": written.nodes,
                "inlined": opened.manifest.custom_ops,
                "passed": passed(written.checks),
                "summary": summary(written.checks),
                "checks": [dict_of_check(check) for check in written.checks],
            }
        )
    say(result_console(as_json=as_json), written_text(written, opened, output))


@dataclass(frozen=True)
class InlinedFiles:
    """The result: files with their total size, the number of nodes, and the checks, none of which failed."""

    files: tuple[Path, ...]
    bytes: int
    nodes: int
    checks: list[Check]


def check_outputs(artifact: Artifact, output: Path, *, force: bool) -> None:
    """Refuse, before any work, files that exist or cannot be written. Raises UserError."""
    check_output_file(output, force=force)
    weights = artifact.manifest.files.get(f"{artifact.model_path.name}.data")
    if weights is not None and weights.bytes > 0:
        check_output_file(data_file(output), force=force)


def data_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.data")


def write_inlined(
    artifact: Artifact, output: Path, on_stage: Callable[[str], None], *, force: bool = False
) -> InlinedFiles:
    """Write the inlined model of an artifact, checked, or nothing.

    Raises StageError if a check fails, UserError for a file of weights that exists, unless `force`, and as
    `write_error` if the files cannot be written.
    """
    from effexport.base.disk import ANOTHER_FILE, write_error
    from effexport.base.errors import StageError, UserError
    from effexport.base.files import partial_folder
    from effexport.proof.cases import stored_cases
    from effexport.proof.verify import verify_candidate
    from effexport.report.wording import failure_lines
    from effexport.runners.options import RunOptions

    if artifact.spec.carrier == "contrib":
        raise UserError(
            f"{artifact.path} was built with --carrier contrib, an operator of ONNX Runtime that has no "
            "function body; build it with --carrier standard, or without a carrier"
        )
    if not artifact.has_golden:
        raise UserError(
            f"{artifact.path} keeps no golden values (--golden none) to compare the inlined file with; build the "
            "artifact with --inline, or with --golden small"
        )
    try:
        # the model names the file of its weights, so both are made under their final names in a folder of their own
        with partial_folder(output) as folder:
            model = folder / output.name
            on_stage("inlining function bodies")
            nodes = save_inlined(artifact, model)
            if data_file(model).is_file():
                check_output_file(data_file(output), force=force)
            on_stage("comparing with the golden file")
            cases = stored_cases(artifact.reference_path, artifact.spec)
            checks = verify_candidate(model, cases, artifact.spec, artifact.manifest.decisions, RunOptions()).checks
            if any(check.status == "failed" for check in checks):
                raise StageError(STAGE, *failure_lines(checks))
            made = [file for file in (data_file(model), model) if file.is_file()]
            size = sum(file.stat().st_size for file in made)
            files = [file.replace(output.with_name(file.name)) for file in made]
    except OSError as error:
        raise write_error(output, error, ANOTHER_FILE) from error
    return InlinedFiles(tuple(reversed(files)), size, nodes, checks)


def save_inlined(artifact: Artifact, path: Path) -> int:
    """Write the inlined model, check its signature, and return how many nodes it has.

    Raises UserError for a model that onnx_ir does not read or write, as one with unknown types, or texts that are none.
    """
    import onnx_ir as ir

    from effexport.export.custom_nodes import inline_functions, save
    from effexport.export.onnx_graph import GraphSignature, check_graph

    spec = artifact.spec
    try:
        model = ir.load(artifact.model_path)
        inline_functions(model)
        save(model, spec, path)
    except ir.serde.SerdeError as error:
        raise UserError(f"{artifact.model_path} is damaged: onnx_ir refuses it; build the artifact again") from error
    check_graph(path, GraphSignature(spec.inputs, spec.outputs, {}))
    return sum(1 for _ in model.graph.all_nodes())


def written_text(written: InlinedFiles, artifact: Artifact, output: Path) -> str:
    """One line: what was written, whether it is proven, and what it is for."""
    from effexport.proof.check import outcomes_text, passed

    if passed(written.checks):
        verdict = f"equal to PyTorch, {outcomes_text(written.checks)}"
    else:
        reason = next(check.reason for check in written.checks if check.status == "not run")
        verdict = f"NOT compared with PyTorch: {reason}"
    ops = ", ".join(f"effexport::{op}" for op in artifact.manifest.custom_ops)
    content = f"{ops} inlined" if ops else "the model had no custom operators"
    names = " and ".join(map(str, written.files))
    data = data_file(output)
    unused = f" {data} is older, and the model does not use it." if data.exists() and data not in written.files else ""
    return (
        f"{names}: {written.nodes} nodes, all of them standard operators of opset {artifact.spec.opset_of_file} "
        f"({content}), {megabytes(written.bytes)}; {verdict}. It is for tools that know no model-local functions, such "
        f"as OpenVINO; kernels and plugins do not apply to it.{unused}"
    )


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
def package_command(options: PackageOptions, as_json: bool) -> None:
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
