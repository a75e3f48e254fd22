"""`effexport inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import debug_option, json_option, stderr_console
from effexport.units import megabytes, seconds

if TYPE_CHECKING:
    from effexport.engines.sidecar import EngineInfo


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@debug_option
def command(path: Path, as_json: bool, debug: bool) -> None:
    """Describe an artifact folder, an ONNX file, a TensorRT engine, or a checkpoint folder that is to be exported.

    Shows inputs, outputs, operators, size and parameters; for a checkpoint, what it computes and its known defects; for
    an engine, its GPUs, its source model and its layers.
    """
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.engines.sidecar import check_engine_file, is_engine, read_sidecar
    from effexport.export.onnx_graph import graph_summary, load_graph
    from effexport.models.families import is_checkpoint
    from effexport.runners.ort.session import kernel_library

    if is_engine(path):
        info = read_sidecar(path)
        check_engine_file(path, info)
        if as_json:
            print_json({"path": str(path), "engine": info.to_dict()})
        else:
            print_engine(path, info)
        return
    if is_checkpoint(path):
        described = describe_checkpoint(path)
        if as_json:
            print_json(described)
        else:
            print_checkpoint(described)
        return
    result: dict[str, Any] = {}
    file = path
    if path.is_dir() or not path.exists():
        artifact = open_artifact(path)
        file = artifact.model_path
        import msgspec

        keys = ("variant", "spec", "precision", "effexport_version", "parity", "engines", "notes")
        result = {key: msgspec.to_builtins(getattr(artifact.manifest, key)) for key in keys}
    result = {
        "path": str(path),
        **result,
        "graph": graph_summary(load_graph(file), file, has_kernels=kernel_library() is not None),
    }
    if as_json:
        print_json(result)
    else:
        print_summary(result)


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """A description of a checkpoint folder, without loading its weights. Raises SpecError for an unsupported one."""
    from effexport.spec import build_spec_from_checkpoint

    spec, notes = build_spec_from_checkpoint({}, folder)
    return {
        "path": str(folder),
        "checkpoint": spec.model.title,
        "attention": spec.attention.actual_variant,
        "max_seq_len": spec.max_seq_len,
        "inputs": [str(tensor) for tensor in spec.inputs],
        "outputs": [str(tensor) for tensor in spec.outputs],
        "custom_ops": spec.custom_ops,
        "spec": spec.to_dict()["model"],
        "notes": list(notes),
        "build": f"effexport build --checkpoint {folder}",
    }


def print_checkpoint(described: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from effexport.report.rendering.text import flat_fields

    table = Table("", "", box=None, pad_edge=False, show_header=False)
    table.add_row("checkpoint", escape(f"{described['path']}: {described['checkpoint']}"))
    table.add_row("attention", described["attention"])
    table.add_row("length", f"1 to {described['max_seq_len']} tokens")
    for kind in ("inputs", "outputs"):
        for tensor in described[kind]:
            table.add_row(kind[:-1], escape(tensor))
    for op, count in described["custom_ops"].items():
        table.add_row("custom operator", f"effexport::{op} × {count}")
    table.add_row("config", escape(", ".join(f"{k}={v}" for k, v in flat_fields(described["spec"]).items())))
    for note in described["notes"]:
        table.add_row("note", escape(note))
    table.add_row("to export it", escape(described["build"]))
    stderr_console().print(table)


def print_summary(result: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from effexport.report.rendering.text import flat_fields, sizes

    table = Table("", "", box=None, pad_edge=False, show_header=False)
    graph = result["graph"]
    table.add_row("path", escape(result["path"]))
    if "spec" in result:
        fields = ", ".join(
            f"{name}={value}" for name, value in flat_fields(result["spec"]).items() if value is not None
        )
        verdict = "passed" if result["parity"]["passed"] else "not proven on the machine that built it"
        table.add_row("spec", fields)
        table.add_row("parity at build", verdict)
    for kind in ("inputs", "outputs"):
        for tensor in graph[kind]:
            dims = ", ".join(map(str, tensor["dims"]))
            table.add_row(kind[:-1], escape(f"{tensor['name']} {tensor['dtype']} [{dims}]"))
    table.add_row("opset", str(graph["opset"]))
    table.add_row("size", f"{megabytes(graph['bytes'])}, {graph['parameters']:,} parameters")
    for engine in result.get("engines", []):
        table.add_row("engine", escape(f"{engine['file']}, {megabytes(engine['bytes'])}, {sizes(engine['profiles'])}"))
    for note in result.get("notes", []):
        table.add_row("note", escape(note))
    for name, entry in graph["custom_ops"].items():
        body = "with its function body" if entry["body"] else "without a function body"
        table.add_row(
            "custom operator", f"effexport::{name} × {entry['count']}, {body}; runs here as {entry['implementation']}"
        )
    histogram = ", ".join(f"{name} {count}" for name, count in graph["ops"].items())
    table.add_row("operators", histogram)
    stderr_console().print(table)


def print_engine(path: Path, info: EngineInfo) -> None:
    """Print the sidecar of an engine; layers are counted here, and listed by --json."""
    from rich.markup import escape
    from rich.table import Table

    from effexport.engines.layers import count_dtypes, count_types
    from effexport.runtimes import RUNTIMES

    def row(name: str, text: str) -> None:
        table.add_row(name, escape(text))

    def counted(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counts.items())

    table = Table("", "", box=None, pad_edge=False, show_header=False)
    row("path", str(path))
    row("built with", f"{RUNTIMES[info.target].label} {info.tensorrt_version}, effexport {info.effexport_version}")
    row("built", f"{info.created}, in {seconds(info.build_seconds)}")
    row("for", info.built_for)
    row("from", f"model.onnx with sha256 {info.onnx_sha256}, {megabytes(info.onnx_bytes)}, {info.precision}")
    row("size", megabytes(info.engine_bytes))
    if info.device_memory_bytes is not None:
        row("memory to run", f"{megabytes(info.device_memory_bytes)}, besides weights, inputs and outputs")
    for kind, tensors in (("input", info.inputs), ("output", info.outputs)):
        for tensor in tensors:
            row(kind, str(tensor))
    for profile in info.profiles:
        for name, (smallest, optimum, largest) in profile.items():
            row("profile", f"{name}: {list(smallest)} to {list(largest)}, tuned for {list(optimum)}")
    for op, what in info.implementation.items():
        row("custom operator", f"effexport::{op} is a {what}")
    row("options", ", ".join(f"{name}={value}" for name, value in info.options.items() if value not in (None, [])))
    source = "in the engine" if info.layers_from == "engine" else "in the network that it was built from"
    row("layers", f"{len(info.layers)} {source}: {counted(count_types(info.layers))}")
    row("element types", f"{counted(count_dtypes(info.layers))}; {info.tensors_compared} compared with the model")
    for remark in info.remarks:
        row("note", remark)
    stderr_console().print(table)
