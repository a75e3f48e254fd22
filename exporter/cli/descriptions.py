"""Commands that only show: list, inspect, report, completion."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from effexport import api
from effexport.artifact import check_output_file
from effexport.base.files import write_output
from effexport.base.formatting import megabytes, say, seconds
from effexport.base.option_fields import A_FILE, Options, argument, option
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.cli._console import cell, result_console
from effexport.cli._verbs import verb
from effexport.options import InspectOptions
from effexport.report.formats import FORMAT_OF_SUFFIX, FORMATS, junit_from_reports, side_of_artifact, text_from_report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from effexport.report.compare import Comparison
    from effexport.tensorrt.sidecar import EngineInfo


@verb("list")
def list_command(_: Options, as_json: bool) -> None:
    """List the attention variants with formula, cost and whether a causal form exists."""
    from effexport.cli.main import print_json
    from effexport.models.variants import ATTENTION_SPECS

    if as_json:
        variants = [
            {
                "name": name,
                "formula": spec.formula,
                "cost": f"O({spec.cost})",
                "causal": not spec.why_not_causal,
                "always_causal": bool(spec.why_always_causal),
                "defaults": spec().to_dict(),
            }
            for name, spec in ATTENTION_SPECS.items()
        ]
        print_json({"variants": variants})
        return
    from rich.table import Table

    table = Table("variant", "formula", "time per layer", "causal", box=None, pad_edge=False)
    for name, spec in ATTENTION_SPECS.items():
        causal = "no" if spec.why_not_causal else "always" if spec.why_always_causal else "yes"
        table.add_row(name, spec.formula, f"O({spec.cost})", causal)
    result_console().print(table)


@verb("inspect", InspectOptions)
def inspect_command(options: InspectOptions, as_json: bool) -> None:
    """Describe an artifact folder, an ONNX file, a TensorRT engine, or a checkpoint folder before its export.

    Shows inputs, outputs, operators, size and parameters; for a checkpoint, what it computes and its known defects; for
    an engine, its GPUs, its source model and its layers.
    """
    from effexport.cli.main import print_json
    from effexport.tensorrt.sidecar import read_sidecar

    found = api.inspected(options)
    if as_json:
        print_json(dict(found.details))
    elif found.kind == "engine":
        print_pairs(pairs_of_engine(found.path, read_sidecar(found.path)))
    else:
        print_pairs((pairs_of_checkpoint if found.kind == "checkpoint" else pairs_of_summary)(found.details))


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print a table of names and values."""
    from rich.table import Table

    table = Table("", "", box=None, pad_edge=False, show_header=False)
    for name, value in pairs:
        table.add_row(cell(name), cell(value))
    result_console().print(table)


def pairs_of_checkpoint(described: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Names and values that describe a checkpoint."""
    from effexport.report.wording import flat_fields

    yield "checkpoint", f"{described['path']}: {described['checkpoint']}"
    yield "attention", described["attention"]
    yield "length", f"1 to {described['max_seq_len']} tokens"
    yield "size", f"{described['parameters']:,} parameters"
    for kind in ("inputs", "outputs"):
        for tensor in described[kind]:
            yield kind[:-1], tensor
    for op, count in described["custom_ops"].items():
        yield "custom operator", f"effexport::{op} × {count}"
    yield "config", ", ".join(f"{name}={value}" for name, value in flat_fields(described["spec"]).items())
    for note in described["notes"]:
        yield "note", note
    yield "to export it", described["build"]


def pairs_of_summary(result: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Names and values that describe an artifact or an ONNX file."""
    import msgspec

    from effexport.quantize.record import Quantization
    from effexport.report.wording import flat_fields, quantization_text, sizes

    graph = result["graph"]
    yield "path", result["path"]
    if "spec" in result:
        flat = flat_fields(result["spec"])
        yield "spec", ", ".join(f"{name}={value}" for name, value in flat.items() if value is not None)
        passed = result["parity"]["passed"]
        yield "parity at build", "passed" if passed else "not proven on the machine that built it"
    for kind in ("inputs", "outputs"):
        for tensor in graph[kind]:
            yield kind[:-1], f"{tensor['name']} {tensor['dtype']} [{', '.join(map(str, tensor['dims']))}]"
    yield "opset", str(graph["opset"])
    yield "size", f"{megabytes(graph['bytes'])}, {graph['parameters']:,} parameters"
    if result.get("quantization"):
        record = msgspec.convert(result["quantization"], Quantization)
        yield "quantised", quantization_text(record)
        floats = dict.fromkeys(f"{product.operator} ({product.reason})" for product in record.products)
        yield "in float", "; ".join(floats) or "nothing that is a product"
    for engine in result.get("engines", []):
        yield "engine", f"{engine['file']}, {megabytes(engine['bytes'])}, {sizes(engine['profiles'])}"
    for note in result.get("notes", []):
        yield "note", note
    for name, entry in graph["custom_ops"].items():
        body = "with its function body" if entry["body"] else "without a function body"
        yield "custom operator", f"effexport::{name} × {entry['count']}, {body}; runs here as {entry['implementation']}"
    yield "operators", ", ".join(f"{name} {count}" for name, count in graph["ops"].items())


def pairs_of_engine(path: Path, info: EngineInfo) -> Iterator[tuple[str, object]]:
    """Names and values from the sidecar of an engine; layers are counted here, and listed by --json."""
    from effexport.base.runtimes import RUNTIMES
    from effexport.plugins.masked_attention.trt import OPERATOR
    from effexport.tensorrt.sidecar import count_dtypes, count_types
    from effexport.tensorrt.spec import options_of_others

    def counted(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counts.items())

    yield "path", path
    yield "built with", f"{RUNTIMES[info.target].label} {info.tensorrt_version}, effexport {info.effexport_version}"
    yield "built", f"{info.created}, in {seconds(info.build_seconds)}"
    yield "for", info.built_for
    yield "from", f"{info.model} with sha256 {info.onnx_sha256}, {megabytes(info.onnx_bytes)}, {info.precision}"
    yield "size", megabytes(info.engine_bytes)
    if info.device_memory_bytes is not None:
        yield "memory to run", f"{megabytes(info.device_memory_bytes)}, besides weights, inputs and outputs"
    for kind, tensors in (("input", info.inputs), ("output", info.outputs)):
        for tensor in tensors:
            yield kind, tensor
    for profile in info.profiles:
        for name, (smallest, optimum, largest) in profile.items():
            yield "profile", f"{name}: {list(smallest)} to {list(largest)}, tuned for {list(optimum)}"
    for op, what in info.implementation.items():
        words = "the standard operator Attention" if what == "Attention" else f"a {what}"
        yield "custom operator", f"effexport::{op} is {words}{reason_for_bodies(info) if what == 'body' else ''}"
    if info.attention_form is not None:
        yield OPERATOR, f"{info.attention_form.form}: {info.attention_form.reason}"
    if info.ptx is not None:
        yield "plugins need", info.ptx
    options = {name: value for name, value in info.options.items() if name not in options_of_others(info.target)}
    yield "options", ", ".join(f"{name}={value}" for name, value in options.items() if value not in (None, []))
    source = "in the engine" if info.layers_from == "engine" else "in the network that it was built from"
    yield "layers", f"{len(info.layers)} {source}: {counted(count_types(info.layers))}"
    if info.kernels:
        yield "kernels", f"{len(info.kernels)} as the builder lists them: {counted(count_types(info.kernels))}"
    for output, what in info.attention.items():
        yield "attention", f"{output}: {what}"
    yield "element types", f"{counted(count_dtypes(info.layers))}; {info.tensors_compared} compared with the model"
    for remark in info.remarks:
        yield "note", remark


def reason_for_bodies(info: EngineInfo) -> str:
    """The reason why operators of an engine are bodies, as the end of a line; notes have those of single operators."""
    if not (runtime := ENGINE_RUNTIMES[info.target]).engine_plugins:
        return f": {runtime.label} has no plugins"
    return ": built with --plugins never" if info.options.get("plugins") == "never" else ", see the note"


@dataclass(frozen=True)
class ReportOptions(Options):
    """The options of `effexport report`."""

    artifact: Path | None = field(default=None, metadata=argument("An artifact folder."))
    other: Path | None = field(default=None, metadata=argument("An artifact folder to compare it with."))
    _: KW_ONLY
    form: str | None = option(
        None, "Default: by the suffix of -o, else markdown.", flag="--format", metavar="NAME", choices=FORMATS
    )
    output: Path | None = option(None, "File to write; default: stdout.", short="-o", metavar=A_FILE)
    force: bool = option(False, "Replace an existing file.")
    schema: bool = option(False, "Print the JSON Schema of report.json.")


@verb("report", ReportOptions)
def report_command(options: ReportOptions, as_json: bool) -> None:
    """Show the report of an artifact in another format, or compare two artifacts side by side.

    Reads report.json and measures nothing; use effexport verify to check a model again. The exit status does not depend
    on the verdict.
    """
    from effexport.base.errors import UserError
    from effexport.cli.main import print_answer, print_json

    artifact, output = options.artifact, options.output
    if output is not None:
        check_output_file(output, force=options.force)
    if options.schema:
        if artifact is not None or options.form is not None:
            raise UserError("--schema describes the reports of all artifacts; leave out the artifact and --format")
        from effexport.report.report import schema_text

        text, about = schema_text(), {"schema": "report.json"}
    else:
        if artifact is None:
            raise UserError("no artifact given; expected an artifact folder, such as: effexport report artifacts/lsh")
        form = chosen_format(options.form, output, as_json=as_json)
        text, about = rendering(artifact, options.other, form)
    if output is None:
        print_answer(text)
        return
    write_output(output, text)
    if as_json:
        print_json({"output": str(output), **about})
    say(result_console(as_json=as_json), f"{output}: written")


def chosen_format(form: str | None, output: Path | None, *, as_json: bool) -> str:
    """The format from --format or the file name. Raises UserError if it is unknown, or if stdout would be shared."""
    from effexport.base.errors import UserError

    if as_json and output is None:
        if form not in (None, "json"):
            raise UserError(f"--json and --format {form} would both print on stdout; add -o FILE")
        return "json"
    named = FORMAT_OF_SUFFIX.get(output.suffix.lower()) if output is not None else None
    if form is not None and named not in (None, form):
        raise UserError(f"--format {form} contradicts -o {output}, a file of the format {named}; leave out --format")
    if form is not None:
        return form
    if output is None or not output.suffix:
        return "markdown"
    if output.suffix.lower() not in FORMAT_OF_SUFFIX:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise UserError(f"{output}: the suffix does not name a format; expected one of {known}, or --format")
    return FORMAT_OF_SUFFIX[output.suffix.lower()]


def rendering(first: Path, second: Path | None, form: str) -> tuple[str, dict[str, Any]]:
    """The text of one report or of a comparison, and the fields that describe it for --json."""
    from effexport.artifact import open_artifact
    from effexport.report.compare import Comparison

    # tables call an artifact by its path, as it was given
    names = [str(path) for path in (first, second) if path is not None]
    sides = [side_of_artifact(open_artifact(Path(name)), name) for name in names]
    about: dict[str, Any] = {
        "format": form,
        "artifacts": names,
        "verdicts": [side.report.verdict for side in sides],
    }
    if form == "junit":
        return junit_from_reports([(side.name, side.report) for side in sides]), about
    if len(sides) == 1:
        return text_from_report(sides[0], form), about
    return comparison_text(Comparison(*sides), form), about


def comparison_text(comparison: Comparison, form: str) -> str:
    from effexport.base.files import json_text
    from effexport.render.formats import html_from_document, markdown_from_document
    from effexport.report.compare import document_from_comparison

    if form == "json":
        return json_text(comparison.to_dict())
    document = document_from_comparison(comparison)
    return html_from_document(document) if form == "html" else markdown_from_document(document)


@dataclass(frozen=True)
class ShellOptions(Options):
    """The options of `effexport completion`."""

    shell: Literal["bash", "zsh", "fish"] = field(metadata=argument("The shell that completes.", metavar="SHELL"))


@verb("completion", ShellOptions)
def completion_command(options: ShellOptions, as_json: bool) -> None:
    """Print a completion script for SHELL: bash, zsh or fish. In bash: eval "$(effexport completion bash)"."""
    from click.shell_completion import get_completion_class

    from effexport.cli.main import cli, print_json

    completion = get_completion_class(options.shell)
    assert completion is not None
    script = completion(cli, {}, "effexport", "_EFFEXPORT_COMPLETE").source()
    if as_json:
        print_json({"shell": options.shell, "script": script})
    else:
        click.echo(script)
