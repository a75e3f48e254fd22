"""The change that packaging makes to one model of a repository: a new version, a new configuration, or nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from effexport.artifact import REMEDY, Artifact
from effexport.dtypes import TensorInfo
from effexport.errors import UserError
from effexport.records import record_from_values
from effexport.spec import BuildSpec, is_optional
from effexport.triton.backend import Backend
from effexport.triton.batching import Batching, batching_of
from effexport.triton.config import ModelConfig, text_from_config
from effexport.triton.content import Content, digest_of_content, digest_of_folder
from effexport.triton.record import CONFIG, RECORD, ModelRecord, Origin, config_digest, read_record
from effexport.triton.signature import GENERATION, Signature, tensors_of
from effexport.triton.spec import LARGEST_VERSION, PackageName, PackageSpec
from effexport.triton.warmup import warm_ups

# added: a new version. configured: the version exists, only the configuration changes. unchanged: nothing is written.
Status = Literal["added", "configured", "unchanged"]
EXAMPLE_LENGTH = 8


@dataclass(frozen=True)
class ModelChange:
    """The files to write for one model.

    content: of the version's folder, None if it exists. files: the others, by their path in the model's folder.
    """

    record: ModelRecord
    version: int
    status: Status
    content: Content | None
    files: Mapping[str, bytes]

    @property
    def name(self) -> str:
        return self.record.name


def model_change(
    artifact: Artifact, repository: Path, name: str, backend: Backend, spec: PackageSpec, *, replace_config: bool
) -> ModelChange:
    """Raises UserError for a version with other contents, or a folder with another model."""
    folder = repository / name
    old = read_record(folder)
    if folder.exists() and old is None:
        raise UserError(
            f"{folder} exists, and effexport did not write it; choose another name with --name, or another repository"
        )
    versions = numbered_folders(folder)
    content = backend.files
    version = version_of(content, versions, spec.version, name)
    is_new = version not in versions
    batching = Batching(0) if backend.generates else batching_of(artifact.spec, spec, backend.engine)
    warm_up = spec.warm_up and not backend.generates
    warm = warm_ups(artifact, warm_up_sizes(backend, batching), backend.engine) if warm_up else ()
    build, title = artifact.spec, f"{artifact.spec.model.title}, {artifact.spec.precision}"
    signature = signature_of(build, backend, batching)
    config = ModelConfig(name, title, backend, signature, batching, warm, spec, version)
    text = text_from_config(config).encode()
    record = model_record(artifact, config, text, old)
    if old is not None:
        check_same_model(folder, old, record)
    files: dict[str, bytes] = {}
    if version == max((*versions, version)):
        files = {f"warmup/{w.files[key]}": w.inputs[key].tobytes() for w in warm for key in w.inputs}
        files[CONFIG] = text
        check_unedited(folder, old, text, replace_config=replace_config)
    elif old is not None:
        # the configuration belongs to the newest version
        record = replace(old, versions=record.versions if is_new else old.versions)
    files[RECORD] = record.text().encode()
    present = {path for path in files if (folder / path).is_file()}
    files = {path: data for path, data in files.items() if path not in present or (folder / path).read_bytes() != data}
    status: Status = "added" if is_new else "configured" if files else "unchanged"
    return ModelChange(record, version, status, content if is_new else None, files)


def numbered_folders(folder: Path) -> dict[int, Path]:
    """The versions of a model. As in Triton, names with leading zeros do not count."""
    if not folder.is_dir():
        return {}
    return {
        int(path.name): path
        for path in folder.iterdir()
        if path.is_dir() and path.name.isascii() and path.name.isdecimal() and not path.name.startswith("0")
    }


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


def warm_up_sizes(backend: Backend, batching: Batching) -> tuple[int, ...]:
    """Batch sizes to warm up: 1, and on a GPU also the preferred ones, for which it chooses memory and kernels."""
    if not batching.max_batch:
        return (0,)
    preferred = batching.preferred if backend.kind == "gpu" else ()
    return tuple(sorted({1, *preferred}))


def signature_of(build: BuildSpec, backend: Backend, batching: Batching) -> Signature:
    if backend.generates:
        return GENERATION
    # effexport's runner has defaults for missing inputs; other backends need every input of the graph
    optional = frozenset(t.name for t in build.inputs if backend.name == "python" and is_optional(t))
    signature = Signature(build.inputs, build.outputs, optional)
    return signature.with_texts(batching.max_batch) if backend.example else signature


def model_record(artifact: Artifact, config: ModelConfig, text: bytes, old: ModelRecord | None) -> ModelRecord:
    build, manifest = artifact.spec, artifact.manifest
    origin = Origin(
        artifact=artifact.path.resolve().name,
        weights_sha256=manifest.weights_sha256,
        built_by=manifest.effexport_version,
        custom_ops=sorted(manifest.custom_ops),
        implementation=implementation_of(config.backend, manifest.custom_ops),
        example=dict(config.backend.example),
    )
    packages: dict[PackageName, str] = {}
    for name in config.backend.packages:
        # those that a build does not record are those of this packaging
        recorded = name in manifest.environment
        release = manifest.environment[name] if recorded else importlib.metadata.version(name)
        if release:
            packages[name] = release
    record = ModelRecord(
        name=config.name,
        group=config.name if config.backend.generates else config.spec.name,
        backend=config.backend.name,
        kind=config.backend.kind,
        title=config.title,
        inputs=config.signature.inputs,
        outputs=config.signature.outputs,
        max_batch=config.batching.max_batch,
        reason=config.batching.reason,
        example_length=build.model.fixed_seq_len
        or max(build.model.shortest, min(EXAMPLE_LENGTH, build.model.max_seq_len or EXAMPLE_LENGTH)),
        tensorrt_version=config.backend.engine.tensorrt_version if config.backend.engine else None,
        server_path=config.spec.server_path,
        config_sha256=config_digest(text),
        packages=packages,
        versions={**(old.versions if old else {}), str(config.version): origin},
    )
    # what comes from the artifact goes into a Dockerfile
    return record_from_values(asdict(record), ModelRecord, str(artifact.path), REMEDY)


def implementation_of(backend: Backend, custom_ops: Mapping[str, int]) -> str:
    if backend.engine is not None:
        return ", ".join(sorted(set(backend.engine.implementation.values()))) or "standard operators"
    return ("kernel" if backend.library else "body") if custom_ops else "standard operators"


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
                f"{folder} has the {kind} {described(before)}, and this artifact has {described(now)}; versions of one "
                "model share a configuration: choose another name with --name"
            )
    if bool(old.reason) != bool(new.reason):
        raise UserError(
            f"requests to {folder} are {'not ' if old.reason else ''}batched, but requests to this artifact "
            f"{'must not be' if new.reason else 'can be'}: {old.reason or new.reason}; choose another name with --name"
        )


def described(tensors: Sequence[TensorInfo]) -> str:
    return ", ".join(map(str, tensors))


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
