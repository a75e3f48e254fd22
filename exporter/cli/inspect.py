"""`effexport inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport import api
from effexport.base.formatting import megabytes, seconds
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.cli._console import cell, result_console
from effexport.cli._verbs import verb
from effexport.options import InspectOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from effexport.tensorrt.sidecar import EngineInfo


@verb("inspect", InspectOptions)
def command(options: InspectOptions, as_json: bool) -> None:
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
