"""Describes artifacts, ONNX files, engines and checkpoints: what `effexport inspect` shows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from effexport.artifact import is_bare_checkpoint, open_artifact
from effexport.base.errors import UserError
from effexport.base.formatting import command_line
from effexport.base.runtimes import ENGINE_SUFFIX
from effexport.base.spec import build_spec_from_checkpoint
from effexport.export.module_source import why_too_large
from effexport.export.onnx_graph import external_sizes, graph_tensors, load_graph, opset_of
from effexport.models.checkpoints.spec import check_no_adapter, how_to_download
from effexport.models.shapes import count
from effexport.models.validation import near_path
from effexport.plugins.ops import DOMAIN
from effexport.runners.ort.kernels import kernel_library
from effexport.tensorrt.sidecar import check_engine_file, read_sidecar

if TYPE_CHECKING:
    import onnx

Kind = Literal["artifact", "model", "engine", "checkpoint"]
# Files that belong to models, but cannot be described.
OTHER_SUFFIXES = (".safetensors", ".toml", ".json", ".npz")
EXPECTED = "expected an artifact folder, a checkpoint folder, an ONNX file or an engine"


def describe(path: Path) -> tuple[Kind, dict[str, Any]]:
    """The kind of a path's content, and its description. Raises UserError for a path that holds something else."""
    if path.suffix == ENGINE_SUFFIX:
        info = read_sidecar(path)
        check_engine_file(path, info)
        return "engine", {"path": str(path), "engine": asdict(info)}
    if is_bare_checkpoint(path):
        return "checkpoint", describe_checkpoint(path)
    if not path.exists():
        raise UserError(f"nothing is at {path}{near_path(path) or f'; {EXPECTED}{how_to_download(path)}'}")
    if path.is_dir():
        check_no_adapter(path)
    try:
        described = describe_model(path)
    except UserError as error:
        if path.suffix not in OTHER_SUFFIXES or path.is_dir():
            raise
        raise UserError(f"{path} is not an ONNX model but a {path.suffix} file; {EXPECTED}") from error
    return "artifact" if "spec" in described else "model", described


def describe_model(path: Path) -> dict[str, Any]:
    """A description of an artifact folder or an ONNX file."""
    described: dict[str, Any] = {"path": str(path)}
    file = path
    if path.is_dir():
        artifact = open_artifact(path)
        file = artifact.model_path
        keys = ("variant", "spec", "precision", "effexport_version", "parity", "engines", "notes", "quantization")
        described |= {key: msgspec.to_builtins(getattr(artifact.manifest, key)) for key in keys}
    return described | {"graph": graph_summary(load_graph(file), file, has_kernels=kernel_library() is not None)}


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """A description of a checkpoint folder, without loading its weights. Raises SpecError for an unsupported one."""
    spec, notes = build_spec_from_checkpoint({}, folder)
    too_large = why_too_large(spec)
    return {
        "path": str(folder),
        "checkpoint": spec.model.title,
        "attention": spec.attention.actual_variant,
        "parameters": count(spec.model.weights()),
        "max_seq_len": spec.model.max_seq_len,
        "inputs": [str(tensor) for tensor in spec.inputs],
        "outputs": [str(tensor) for tensor in spec.outputs],
        "custom_ops": spec.custom_ops,
        "spec": spec.to_dict()["model"],
        "notes": [*notes, *([f"It cannot be built here: {too_large}."] if too_large else [])],
        "build": command_line("effexport", "build", "--checkpoint", folder),
    }


def graph_summary(model: onnx.ModelProto, path: Path, *, has_kernels: bool) -> dict[str, Any]:
    """The summary for `inspect`: inputs, outputs, operators by frequency, custom operators, size, parameters.

    has_kernels: whether ONNX Runtime gets kernels for custom operators, which it prefers to their bodies.
    """

    def plain(values: object) -> list[dict[str, Any]]:
        return [{"name": t.name, "dtype": t.dtype, "dims": list(t.dims)} for t in graph_tensors(values)]

    bodies = {(function.domain, function.name) for function in model.functions}
    counts = Counter((node.domain, node.op_type) for node in model.graph.node)
    sizes = [file.stat().st_size for file in (path, *(path.parent / name for name in external_sizes(model)))]
    return {
        "inputs": plain(model.graph.input),
        "outputs": plain(model.graph.output),
        "opset": opset_of(model),
        "ops": {(f"{domain}::" if domain else "") + op: count for (domain, op), count in counts.most_common()},
        "custom_ops": {
            op: {
                "count": count,
                "body": (DOMAIN, op) in bodies,
                "implementation": "kernel" if has_kernels else "body" if (DOMAIN, op) in bodies else "nothing",
            }
            for (domain, op), count in counts.items()
            if domain == DOMAIN
        },
        "bytes": sum(sizes),
        "parameters": sum(math.prod(tensor.dims) for tensor in model.graph.initializer),
    }
