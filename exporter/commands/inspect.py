"""`effexport inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from effexport.commands._options import debug_option, json_option, stderr_console


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@debug_option
def command(path: Path, as_json: bool, debug: bool) -> None:
    """Describe an artifact folder or an ONNX file: inputs, outputs, operators, size, parameters."""
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.onnx_graph import graph_summary, load_graph
    from effexport.runners.ort_session import kernel_library

    result: dict[str, Any] = {}
    file = path
    if path.is_dir() or not path.exists():
        artifact = open_artifact(path)
        file = artifact.model_path
        keys = ("variant", "spec", "precision", "effexport_version", "parity", "engines")
        result = {key: artifact.manifest[key] for key in keys}
    result = {
        "path": str(path),
        **result,
        "graph": graph_summary(load_graph(file), file, has_kernels=kernel_library() is not None),
    }
    if as_json:
        print_json(result)
    else:
        print_summary(result)


def print_summary(result: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from effexport.report import flat_fields

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
    table.add_row("size", f"{graph['bytes'] / 1e6:.1f} MB, {graph['parameters']:,} parameters")
    for name, entry in graph["custom_ops"].items():
        body = "with its function body" if entry["body"] else "without a function body"
        table.add_row(
            "custom operator", f"effexport::{name} × {entry['count']}, {body}; runs here as {entry['implementation']}"
        )
    histogram = ", ".join(f"{name} {count}" for name, count in graph["ops"].items())
    table.add_row("operators", histogram)
    stderr_console().print(table)
