"""artifact → model repository, for `effexport package`: its models, and the pages that its records make."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from effexport.artifact import MANIFEST, REMEDY, Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import UserError
from effexport.base.files import json_text
from effexport.base.records import record_from_values
from effexport.base.spec import is_optional
from effexport.plugins.building.library import LIBRARY_NAME
from effexport.runners.runner import tensors_text
from effexport.serving.engine.signature import BINARY_ONLY, example_shape, protocol_type, tensors_of
from effexport.serving.triton.config import Backend, choose_backends, render, warm_up_file
from effexport.serving.triton.repository import (
    CONFIG,
    RECORD,
    Content,
    ModelChange,
    ModelRecord,
    Origin,
    Status,
    config_digest,
    digest_of_content,
    digest_of_folder,
    locked_repository,
    read_record,
    write_changes,
)
from effexport.serving.triton.spec import (
    BACKENDS,
    DEFAULT_IMAGE_TAG,
    IMAGE_TAG,
    LARGEST_VERSION,
    PackageName,
    PackageSpec,
)
from effexport.tasks.fast_tokenizer import TOKENIZER_JSON

EXAMPLE_LENGTH = 8
# Every Python model imports them, besides NumPy; one with a tokenizer, tokenizers as well.
PYTHON_PACKAGES: tuple[PackageName, ...] = ("msgspec", "onnx", "onnxruntime")
# Of a version.
NUMBER = re.compile("[1-9][0-9]*")


def model_change(repository: Path, name: str, backend: Backend, *, replace_config: bool) -> ModelChange:
    """Raises UserError for a version with other contents, or a folder with another model."""
    folder = repository / name
    old = read_record(folder)
    if folder.exists() and old is None:
        raise UserError(
            f"{folder} exists, and effexport did not write it; choose another name with --name, or another repository"
        )
    # as in Triton, names with leading zeros do not count
    versions = {int(path.name): path for path in folder.glob("*") if path.is_dir() and NUMBER.fullmatch(path.name)}
    content = backend.files
    version = version_of(content, versions, backend.spec.version, name)
    is_new = version not in versions
    text = backend.config(name, version)
    record = model_record(backend, name, version, text, old)
    if old is not None:
        check_same_model(folder, old, record)
    files: dict[str, bytes] = {}
    if version == max((*versions, version)):
        inputs = [item for one in backend.warm_ups for item in one.items()]
        files = {f"warmup/{warm_up_file(value, key)}": value.tobytes() for key, value in inputs}
        files[CONFIG] = text
        check_unedited(folder, old, text, replace_config=replace_config)
    elif old is not None:
        # the configuration belongs to the newest version
        record = replace(old, versions=record.versions if is_new else old.versions)
    files[RECORD] = json_text(asdict(record)).encode()
    present = {path for path in files if (folder / path).is_file()}
    files = {path: data for path, data in files.items() if path not in present or (folder / path).read_bytes() != data}
    status: Status = "added" if is_new else "configured" if files else "unchanged"
    return ModelChange(record, version, status, content if is_new else None, files)


def version_of(content: Content, versions: Mapping[int, Path], wanted: int | None, name: str) -> int:
    """The number of the version with this content, else the next free one. Versions are never overwritten."""
    digest = digest_of_content(content)
    if wanted is not None:
        if wanted in versions and digest_of_folder(versions[wanted]) != digest:
            raise UserError(
                f"version {wanted} of {name} exists with other contents; versions are never overwritten: leave "
                f"out --version for the next free number, {next_free(versions)}"
            )
        return wanted
    same = [number for number, folder in versions.items() if digest_of_folder(folder) == digest]
    return max(same) if same else next_free(versions)


def next_free(versions: Mapping[int, Path]) -> int:
    number = max(versions, default=0) + 1
    if number > LARGEST_VERSION:
        raise UserError("no version number is left; choose a smaller one with --version")
    return number


def model_record(backend: Backend, name: str, version: int, text: bytes, old: ModelRecord | None) -> ModelRecord:
    """text: of its configuration. old: the record of the model so far."""
    artifact, spec, signature = backend.artifact, backend.spec, backend.signature
    model, manifest = artifact.spec.model, artifact.manifest
    implementation = "standard operators"
    if backend.engine is not None:
        implementation = ", ".join(sorted(set(backend.engine.implementation.values()))) or implementation
    elif manifest.custom_ops:
        implementation = "kernel" if LIBRARY_NAME in backend.files else "body"
    origin = Origin(
        artifact=artifact.path.resolve().name,
        weights_sha256=manifest.weights_sha256,
        built_by=manifest.effexport_version,
        custom_ops=sorted(manifest.custom_ops),
        implementation=implementation,
        example=dict(backend.example),
    )
    packages = PYTHON_PACKAGES if backend.name == "python" else ()
    if backend.name == "python" and TOKENIZER_JSON in manifest.files and (backend.example or backend.generates):
        packages = (*packages, "tokenizers")
    # those that a build does not record are those of this packaging
    recorded = manifest.environment
    releases = {one: recorded[one] if one in recorded else importlib.metadata.version(one) for one in packages}
    record = ModelRecord(
        name=name,
        group=name if backend.generates else spec.name,
        backend=backend.name,
        kind=backend.kind,
        title=backend.title,
        inputs=signature.inputs,
        outputs=signature.outputs,
        max_batch=backend.batching.max_batch,
        reason=backend.batching.reason,
        example_length=model.fixed_seq_len
        or max(model.shortest, min(EXAMPLE_LENGTH, model.max_seq_len or EXAMPLE_LENGTH)),
        tensorrt_version=backend.engine.tensorrt_version if backend.engine else None,
        server_path=spec.server_path,
        config_sha256=config_digest(text),
        packages={package: release for package, release in releases.items() if release},
        versions={**(old.versions if old else {}), str(version): origin},
    )
    # what comes from the artifact goes into a Dockerfile
    return record_from_values(asdict(record), ModelRecord, str(artifact.path), REMEDY)


def check_same_model(folder: Path, old: ModelRecord, new: ModelRecord) -> None:
    """Raises UserError unless both can share the configuration of one model."""
    if old.backend != new.backend:
        raise UserError(
            f"{folder} is a model for the backend {old.backend}; expected another name for {new.backend}: choose one "
            "with --name"
        )
    for kind in ("inputs", "outputs"):
        # a version that reads texts and an older one that does not may share a configuration
        before, now = tensors_of(getattr(old, kind)), tensors_of(getattr(new, kind))
        if before != now:
            raise UserError(
                f"{folder} has the {kind} {tensors_text(before)}, and this artifact has {tensors_text(now)}; versions "
                "of one model share a configuration: choose another name with --name"
            )
    if bool(old.reason) != bool(new.reason):
        raise UserError(
            f"requests to {folder} are {'not ' if old.reason else ''}batched, but requests to this artifact "
            f"{'must not be' if new.reason else 'can be'}: {old.reason or new.reason}; choose another name with --name"
        )


def check_unedited(folder: Path, old: ModelRecord | None, text: bytes, *, replace_config: bool) -> None:
    """Raises UserError if a hand-edited configuration would be overwritten."""
    path = folder / CONFIG
    if old is None or not path.is_file() or replace_config:
        return
    present = path.read_bytes()
    if present != text and config_digest(present) != old.config_sha256:
        raise UserError(
            f"{path} was changed after effexport wrote it; keep a copy of your changes, then overwrite it with "
            "--replace-config"
        )


@dataclass(frozen=True)
class PackageResult:
    """The result of packaging an artifact. serve: the command of the server. remarks: sentences for the user."""

    repository: Path
    changes: tuple[ModelChange, ...]
    serve: tuple[str, ...]
    remarks: tuple[str, ...]


def package_artifact(
    artifact: Artifact, repository: Path, spec: PackageSpec, *, replace_config: bool = False
) -> PackageResult:
    """Add an artifact to a model repository. Everything is written, or nothing.

    replace_config: overwrite a hand-edited config.pbtxt.
    Raises UserError if the artifact cannot be served, the version exists, or the repository cannot be written.
    """
    check_repository(repository, artifact)
    backends, remarks = choose_backends(artifact, spec)
    with locked_repository(repository):
        changes = []
        is_named_alone = len(spec.backends) == 1
        for backend in backends:
            kind = "generate" if backend.generates else backend.name
            name = spec.name if is_named_alone and not backend.generates else f"{spec.name}-{kind}"
            changes.append(model_change(repository, name, backend, replace_config=replace_config))
        known = (record for path in sorted(repository.iterdir()) if (record := read_record(path)) is not None)
        records = {record.name: record for record in (*known, *(change.record for change in changes))}
        for name, record in records.items():
            if record.server_path != spec.server_path:  # configurations contain absolute paths
                raise UserError(
                    f"{name} was packaged with --server-path {record.server_path}, not {spec.server_path}; give the "
                    "same path for all models, or use another repository"
                )
        check_image(changes, spec.image_tag)
        pages, kept = pages_of_repository(repository, records, spec.image_tag)
        write_changes(repository, changes, pages)
    if repository.resolve().name == "triton":
        remarks += (
            f"Python programs started in {repository.resolve().parent} take its folder triton for the package of that "
            "name, and PyTorch then fails to compile; use another name, such as -o triton-models",
        )
    remarks += tuple(f"{repository / name} was not written by effexport and was not changed" for name in kept)
    remarks += tuple(
        f"{change.name}: no dynamic batching: {change.record.reason}" for change in changes if change.record.reason
    )
    for change in changes:
        newest = max(map(int, change.record.versions))
        if change.version < newest:
            remarks += (
                f"{change.name}: Triton serves the newest version, {newest}; to serve this artifact, give it a higher "
                f"number with --version {newest + 1}",
            )
    return PackageResult(repository, tuple(changes), serve_arguments(records), remarks)


def check_repository(repository: Path, artifact: Artifact) -> None:
    """Raises UserError for a path that cannot be a repository."""
    is_file = repository.exists() and not repository.is_dir()
    if is_file or (repository / MANIFEST).exists():
        kind = "a file" if is_file else "an artifact"
        raise UserError(f"{repository} is {kind}; expected the folder of a model repository, or a new one")
    if repository.resolve().is_relative_to(artifact.path.resolve()):
        raise UserError(f"{repository} is inside the artifact {artifact.path}; choose another folder with -o")


# First releases of the image, as (year, month), whose Python can run effexport, and whose ONNX Runtime loads kernels
# that were compiled for 1.21.
FIRST_IMAGES = {"python": (24, 12, "Python 3.11 or later"), "onnxruntime": (25, 3, "ONNX Runtime 1.21 or later")}


def check_image(changes: Sequence[ModelChange], tag: str | None) -> None:
    """Raises UserError for an image that is known to be too old for these models; custom tags are not checked."""
    found = re.match(r"(\d\d)\.(\d\d)(?!\d)", tag or "")
    if found is None:
        return
    release = (int(found[1]), int(found[2]))
    for change in changes:
        backend, implementation = change.record.backend, change.record.versions[str(change.version)]["implementation"]
        year, month, reason = FIRST_IMAGES.get(backend, (0, 0, ""))
        if release < (year, month) and (backend == "python" or implementation == "kernel"):
            raise UserError(
                f"image tag {tag}: {change.name} needs {reason}, which images have from {year}.{month:02} on; "
                "choose a later --image-tag"
            )


# Part of the first line of each page that effexport wrote; other pages are not changed.
MARK = "written by effexport package"
PAGES = ("README.md", "compose.yaml", "Dockerfile", ".dockerignore")
# Requests with more numbers are not shown as examples.
LARGEST_EXAMPLE = 64


def pages_of_repository(
    repository: Path, records: Mapping[str, ModelRecord], image_tag: str | None
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The pages to write, and the names of those that effexport did not write and therefore keeps."""
    present = {name: (repository / name).read_bytes() for name in PAGES if (repository / name).is_file()}
    kept = tuple(name for name, data in present.items() if MARK.encode() not in data.split(b"\n", 1)[0])
    own = {name: data for name, data in present.items() if name not in kept}
    # without a new tag, that of the present Dockerfile
    dockerfile = own.get("Dockerfile", b"").decode(errors="replace")
    found = re.search(rf"^ARG TRITON_TAG=({IMAGE_TAG.pattern})$", dockerfile, re.MULTILINE)
    values = page_values(records, image_tag or (found[1] if found else DEFAULT_IMAGE_TAG))
    pages = {name: render(f"{name.removeprefix('.')}.j2", values).encode() for name in PAGES if name not in kept}
    return {name: data for name, data in pages.items() if own.get(name) != data}, kept


def page_values(records: Mapping[str, ModelRecord], tag: str) -> dict[str, Any]:
    models = [records[name] for name in sorted(records)]
    loaded = loaded_models(records)
    first = next((record for record in loaded if not record.generates), loaded[0])
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
        "client_inputs": example_inputs(first),
        "protocol_type": protocol_type,
        "tensors": tensors_of,
        # a model that is loaded, if there is one
        "reader": next((record for record in (*loaded, *models) if record.example), None),
        "generator": next((record for record in models if record.generates), None),
        "has_kernels": any(
            version["implementation"] == "kernel" for record in models for version in record.versions.values()
        ),
        "has_onnxruntime": any(record.backend == "onnxruntime" for record in models),
    }


def loaded_models(records: Mapping[str, ModelRecord]) -> list[ModelRecord]:
    """The models to load: one per artifact, because the others are the same artifact in another backend."""
    best: dict[str, ModelRecord] = {}
    for record in sorted(records.values(), key=lambda record: (BACKENDS.index(record.backend), record.name)):
        best.setdefault(record.group, record)
    return sorted(best.values(), key=lambda record: record.name)


def serve_arguments(records: Mapping[str, ModelRecord]) -> tuple[str, ...]:
    """The command that starts the server."""
    path = next(iter(records.values())).server_path
    return (
        "tritonserver",
        f"--model-repository={path}",
        "--model-control-mode=explicit",
        *(f"--load-model={record.name}" for record in loaded_models(records)),
    )


def packages_of(models: list[ModelRecord]) -> list[str]:
    """Packages for the Python models, each at the newest version with which an artifact was built."""
    python = [record for record in models if record.backend == "python"]
    releases = [release for record in python for release in record.packages.items()]
    newest = dict(sorted(releases, key=lambda release: [int(part) for part in re.findall(r"\d+", release[1])]))
    suffix = "-gpu" if any(record.kind == "gpu" for record in python) else ""
    return [f"{name}{suffix if name == 'onnxruntime' else ''}=={version}" for name, version in sorted(newest.items())]


def example_inputs(record: ModelRecord) -> list[tuple[TensorInfo, list[int]]]:
    """The inputs of an example request with their shapes; Python models have defaults for masks and segments."""
    needed = [tensor for tensor in tensors_of(record.inputs) if record.backend != "python" or not is_optional(tensor)]
    sizes = {"batch": 1, "seq": record.example_length}
    return [(tensor, list(example_shape(tensor, sizes))) for tensor in needed]


def json_request(record: ModelRecord) -> str | None:
    """An example request for curl; None if it is too long to read, or has float16, which Triton refuses in JSON."""
    if any(protocol_type(tensor.dtype) in BINARY_ONLY for tensor in (*record.inputs, *record.outputs)):
        return None
    inputs = [
        # token 1 is not padding; a mask of ones keeps every token
        {"name": one.name, "shape": shape, "datatype": protocol_type(one.dtype), "data": [1] * math.prod(shape)}
        for one, shape in example_inputs(record)
    ]
    return None if any(len(one["data"]) > LARGEST_EXAMPLE for one in inputs) else json.dumps({"inputs": inputs})
