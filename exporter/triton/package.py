"""artifact → model repository, for `effexport package`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from effexport.artifact import MANIFEST, Artifact
from effexport.errors import UserError
from effexport.triton.backends import choose_backends
from effexport.triton.models import ModelChange, model_change
from effexport.triton.pages import pages_of_repository, serve_arguments
from effexport.triton.record import ModelRecord, read_record
from effexport.triton.spec import PackageSpec
from effexport.triton.writing import locked_repository, write_changes


@dataclass(frozen=True)
class Package:
    """The result of packaging an artifact. serve: the command of the server. remarks: sentences for the user."""

    repository: Path
    changes: tuple[ModelChange, ...]
    serve: tuple[str, ...]
    remarks: tuple[str, ...]


def package_artifact(
    artifact: Artifact, repository: Path, spec: PackageSpec, *, replace_config: bool = False
) -> Package:
    """Add an artifact to a model repository. Everything is written, or nothing.

    replace_config: overwrite a hand-edited config.pbtxt.
    Raises UserError if the artifact cannot be served, the version exists, or the repository cannot be written.
    """
    check_repository(repository, artifact)
    backends, remarks = choose_backends(artifact, spec)
    with locked_repository(repository):
        changes = []
        names = tuple(backend.name for backend in backends if not backend.generates)
        for backend in backends:
            name = f"{spec.name}-generate" if backend.generates else spec.model_name(backend.name, names)
            changes.append(model_change(artifact, repository, name, backend, spec, replace_config=replace_config))
        records = records_of(repository) | {change.name: change.record for change in changes}
        check_server_path(records, spec)
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
    return Package(repository, tuple(changes), serve_arguments(records), remarks)


def check_repository(repository: Path, artifact: Artifact) -> None:
    """Raises UserError for a path that cannot be a repository."""
    if repository.exists() and not repository.is_dir():
        raise UserError(f"{repository} is a file; expected the folder of a model repository, or a new one")
    if (repository / MANIFEST).exists():
        raise UserError(f"{repository} is an artifact; expected the folder of a model repository, or a new one")
    if repository.resolve().is_relative_to(artifact.path.resolve()):
        raise UserError(f"{repository} is inside the artifact {artifact.path}; choose another folder with -o")


def records_of(repository: Path) -> dict[str, ModelRecord]:
    """The models of a repository that effexport wrote, by name."""
    found = {}
    for folder in sorted(path for path in repository.iterdir() if path.is_dir()):
        record = read_record(folder)
        if record is not None:
            found[folder.name] = record
    return found


# First releases of the image, as (year, month), whose Python can run effexport, and whose ONNX Runtime loads kernels
# that were compiled for 1.21.
FIRST_IMAGE_WITH_PYTHON_311 = (24, 12)
FIRST_IMAGE_WITH_ORT_121 = (25, 3)


def check_image(changes: Sequence[ModelChange], tag: str | None) -> None:
    """Raises UserError for an image that is known to be too old for these models; custom tags are not checked."""
    found = re.match(r"(\d\d)\.(\d\d)(?!\d)", tag or "")
    if found is None:
        return
    release = (int(found[1]), int(found[2]))
    for change in changes:
        backend, implementation = change.record.backend, change.record.versions[str(change.version)]["implementation"]
        first, reason = (0, 0), ""
        if backend == "python":
            first, reason = FIRST_IMAGE_WITH_PYTHON_311, "Python 3.11 or later"
        elif backend == "onnxruntime" and implementation == "kernel":
            first, reason = FIRST_IMAGE_WITH_ORT_121, "ONNX Runtime 1.21 or later"
        if release < first:
            raise UserError(
                f"image tag {tag}: {change.name} needs {reason}, which images have from {first[0]}.{first[1]:02} on; "
                "choose a later --image-tag"
            )


def check_server_path(records: dict[str, ModelRecord], spec: PackageSpec) -> None:
    """Raises UserError if models have different paths on the server; configurations contain absolute paths."""
    for name, record in records.items():
        if record.server_path != spec.server_path:
            raise UserError(
                f"{name} was packaged with --server-path {record.server_path}, not {spec.server_path}; give the same "
                "path for all models, or use another repository"
            )
