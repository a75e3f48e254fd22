"""README.md, compose.yaml, Dockerfile and .dockerignore of a repository, from the records of its models."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

from effexport.dtypes import TensorInfo
from effexport.render.markdown import escaped
from effexport.serving.engine.signature import protocol_type, tensors_of
from effexport.serving.triton.repository import ModelRecord
from effexport.serving.triton.spec import BACKENDS, DEFAULT_IMAGE_TAG, IMAGE_TAG
from effexport.spec import is_optional
from effexport.units import listed

# Part of the first line of each page that effexport wrote; other pages are not changed.
MARK = "written by effexport package"
PAGES = ("README.md", "compose.yaml", "Dockerfile", ".dockerignore")
# Requests with more numbers are not shown as examples.
LARGEST_EXAMPLE = 64
NOT_IN_JSON = ("float16", "bfloat16")
# Of the example in Python.
EXAMPLE_NAMES = ("np", "client", "server", "inputs", "answer", "list", "print")


def pages_of_repository(
    repository: Path, records: Mapping[str, ModelRecord], image_tag: str | None
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The pages to write, and the names of those that effexport did not write and therefore keeps."""
    tag = image_tag or present_tag(repository) or DEFAULT_IMAGE_TAG
    values = page_values(records, tag)
    pages, kept = {}, []
    for name in PAGES:
        data = render(f"{name.removeprefix('.')}.j2", values).encode()
        path = repository / name
        present = path.read_bytes() if path.is_file() else None
        if present is not None and MARK.encode() not in present.split(b"\n", 1)[0]:
            kept.append(name)
        elif present != data:
            pages[name] = data
    return pages, tuple(kept)


def present_tag(repository: Path) -> str | None:
    """The image tag in the repository's Dockerfile, if effexport wrote it."""
    path = repository / "Dockerfile"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = re.search(rf"^ARG TRITON_TAG=({IMAGE_TAG.pattern})$", text, re.MULTILINE)
    return found[1] if found and MARK in text.split("\n", 1)[0] else None


def page_values(records: Mapping[str, ModelRecord], tag: str) -> dict[str, Any]:
    models = [records[name] for name in sorted(records)]
    loaded = [records[name] for name in loaded_models(records)]
    first = next((record for record in loaded if not record.generates), loaded[0])
    # a model that is loaded, if there is one
    readers = [record for record in (*loaded, *models) if record.example]
    generators = [record for record in models if record.generates]
    return {
        "mark": MARK,
        "tag": tag,
        "models": models,
        "loaded": [record.name for record in loaded],
        "others": [record.name for record in models if record not in loaded],
        "server_path": first.server_path,
        "serve": serve_arguments(records),
        "on_gpu": any(record.kind == "gpu" for record in loaded),
        "packages": packages_of(models),
        "tensorrt": {record.name: record.tensorrt_version for record in models if record.tensorrt_version},
        "first": first,
        "request": json_request(first),
        "client_inputs": [(tensor, variable(tensor), example_shape(first, tensor)) for tensor in needed_inputs(first)],
        "protocol_type": protocol_type,
        "tensors": tensors_of,
        "reader": readers[0] if readers else None,
        "generator": generators[0] if generators else None,
        "has_kernels": any(
            version["implementation"] == "kernel" for record in models for version in record.versions.values()
        ),
        "has_onnxruntime": any(record.backend == "onnxruntime" for record in models),
    }


def loaded_models(records: Mapping[str, ModelRecord]) -> list[str]:
    """The models to load: one per artifact, because the others are the same artifact in another backend."""
    best: dict[str, ModelRecord] = {}
    for record in sorted(records.values(), key=lambda record: (BACKENDS.index(record.backend), record.name)):
        best.setdefault(record.group, record)
    return sorted(record.name for record in best.values())


def serve_arguments(records: Mapping[str, ModelRecord]) -> tuple[str, ...]:
    """The command that starts the server."""
    path = next(iter(records.values())).server_path
    return (
        "tritonserver",
        f"--model-repository={path}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in loaded_models(records)),
    )


def packages_of(models: list[ModelRecord]) -> list[str]:
    """Packages for the Python models, each at the newest version with which an artifact was built."""
    newest: dict[str, str] = {}
    python = [record for record in models if record.backend == "python"]
    for record in python:
        for name, version in record.packages.items():
            newest[name] = max(newest.get(name, ""), version, key=version_key)
    suffix = "-gpu" if any(record.kind == "gpu" for record in python) else ""
    return [f"{name}{suffix if name == 'onnxruntime' else ''}=={version}" for name, version in sorted(newest.items())]


def version_key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def needed_inputs(record: ModelRecord) -> list[TensorInfo]:
    """The inputs of an example request; Python models have defaults for masks and segments."""
    return [tensor for tensor in tensors_of(record.inputs) if record.backend != "python" or not is_optional(tensor)]


def variable(tensor: TensorInfo) -> str:
    """The name of a tensor's variable in the example in Python."""
    name = tensor.name
    return name if name.isidentifier() and not iskeyword(name) and name not in EXAMPLE_NAMES else "array"


def example_shape(record: ModelRecord, tensor: TensorInfo) -> list[int]:
    sizes = {"batch": 1, "seq": record.example_length}
    return [dim if isinstance(dim, int) else sizes.get(dim, 2) for dim in tensor.dims]


def json_request(record: ModelRecord) -> str | None:
    """An example request for curl; None if it is too long to read, or has float16, which Triton refuses in JSON."""
    if any(tensor.dtype in NOT_IN_JSON for tensor in (*record.inputs, *record.outputs)):
        return None
    inputs = []
    for tensor in needed_inputs(record):
        shape = example_shape(record, tensor)
        count = math.prod(shape)
        if count > LARGEST_EXAMPLE:
            return None
        # token 1 is not padding; a mask of ones keeps every token
        inputs.append(
            {"name": tensor.name, "shape": shape, "datatype": protocol_type(tensor.dtype), "data": [1] * count}
        )
    return json.dumps({"inputs": inputs})


def render(template: str, values: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("effexport", "serving/triton"),
        autoescape=False,  # Markdown, YAML and a Dockerfile; `ModelRecord` has checked the names in them
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"listed": listed, "json": json.dumps, "escaped": escaped, "quoted": shlex.quote}
    return environment.get_template(template).render(values)
