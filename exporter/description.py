"""Describes artifacts, ONNX files, engines and checkpoints: what `effexport inspect` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from effexport.artifact import is_bare_checkpoint, open_artifact
from effexport.errors import UserError
from effexport.export.module_source import why_too_large
from effexport.export.onnx_graph import graph_summary, load_graph
from effexport.models.checkpoints.spec import check_no_adapter, how_to_download
from effexport.models.shapes import count
from effexport.models.validation import near_path
from effexport.runners.ort.kernels import kernel_library
from effexport.shell import command_line
from effexport.spec import build_spec_from_checkpoint
from effexport.tensorrt.sidecar import check_engine_file, is_engine, read_sidecar

Kind = Literal["artifact", "model", "engine", "checkpoint"]
# Files that belong to models, but cannot be described.
OTHER_SUFFIXES = (".safetensors", ".toml", ".json", ".npz")
EXPECTED = "expected an artifact folder, a checkpoint folder, an ONNX file or an engine"


def describe(path: Path) -> tuple[Kind, dict[str, Any]]:
    """The kind of a path's content, and its description. Raises UserError for a path that holds something else."""
    if is_engine(path):
        info = read_sidecar(path)
        check_engine_file(path, info)
        return "engine", {"path": str(path), "engine": info.to_dict()}
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
