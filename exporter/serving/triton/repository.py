"""A model repository on disk: records of its models, contents of their folders, and changes that are written whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec

from effexport.base.disk import ANOTHER_FOLDER, write_error
from effexport.base.dtypes import TensorInfo, check_tensors
from effexport.base.errors import UserError
from effexport.base.files import abandoned, created_folder, file_digest
from effexport.base.records import record_from_values, values_of_file
from effexport.serving.engine.signature import STRING, TEXT_INPUT
from effexport.serving.triton.spec import SERVER_PATH, BackendName, PackageName

RECORD = "effexport.json"
CONFIG = "config.pbtxt"
FORMAT_VERSION = 1
REPACKAGE = "remove the model's folder and package it again"


class Origin(TypedDict):
    """The origin of a packaged version. example: the texts of an example request; {} without texts."""

    artifact: str
    weights_sha256: str
    built_by: str
    custom_ops: list[str]
    implementation: str
    example: NotRequired[dict[str, str]]


# The number of a version, as a folder of Triton is named: up to LARGEST_VERSION.
Number = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,18}\Z")]
# The pages put these into shell commands and YAML as they are.
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\Z")]
ServerPath = Annotated[str, msgspec.Meta(pattern=rf"^{SERVER_PATH.pattern}\Z")]
Tensors = Annotated[tuple[TensorInfo, ...], msgspec.Meta(min_length=1)]
# Of a package, such as 1.27.0 or 2.13.0+cpu.
Release = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+!_-]{0,99}\Z")]


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model of a repository.

    group: the name that the models of one artifact share. reason: why its requests are not batched.
    example_length: tokens of an example request. tensorrt_version: of the TensorRT that built its engine.
    server_path: path of the repository on the server. config_sha256: of config.pbtxt as it was written.
    packages: versions of the packages that a Python model imports. versions: the origin of each version, by number.
    """

    name: Name
    group: Name
    backend: BackendName
    kind: Literal["cpu", "gpu"]
    title: str
    inputs: Tensors
    outputs: Tensors
    max_batch: int
    reason: str
    example_length: int
    tensorrt_version: Release | None
    server_path: ServerPath
    config_sha256: str
    packages: Mapping[PackageName, Release] = field(default_factory=dict)
    versions: Annotated[Mapping[Number, Origin], msgspec.Meta(min_length=1)]
    format_version: int = FORMAT_VERSION

    @property
    def generates(self) -> bool:
        return any(tensor.name == TEXT_INPUT for tensor in self.inputs)

    @property
    def example(self) -> Mapping[str, str]:
        """The texts of an example request; {} for a model of tensors only."""
        return self.versions[max(self.versions, key=int)].get("example", {})


def read_record(folder: Path) -> ModelRecord | None:
    """The record of a model; None if effexport did not write it. Raises UserError if it is damaged or newer."""
    path = folder / RECORD
    if not path.is_file():
        return None
    values = values_of_file(path, REPACKAGE)
    version = values.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise UserError(f"{path} was written by a newer effexport; upgrade effexport")
    record = record_from_values(values, ModelRecord, str(path), REPACKAGE)
    check_tensors((*record.inputs, *record.outputs), str(path), REPACKAGE, others=(STRING,))
    if record.name != folder.name:
        raise UserError(f"{path} is damaged: it describes the model {record.name!r}; {REPACKAGE}")
    return record


def config_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


Content = Mapping[str, bytes | Path]
# The server may write this folder beside model.py.
IGNORED = "__pycache__"


def digest_of_content(content: Content) -> str:
    """A checksum of names and contents."""
    digests = {
        name: file_digest(source) if isinstance(source, Path) else hashlib.sha256(source).hexdigest()
        for name, source in content.items()
    }
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def digest_of_folder(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file() and IGNORED not in path.parts)
    return digest_of_content({path.relative_to(folder).as_posix(): path for path in files})


def write_content(content: Content, folder: Path) -> None:
    """Write all files and flush them to disk, so that they are complete before they are renamed into place."""
    for name, source in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, Path):
            shutil.copyfile(source, path)
        else:
            path.write_bytes(source)
        # the server may run as another user, in a container
        path.chmod(0o644)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


# added: a new version. configured: the version exists, only the configuration changes. unchanged: nothing is written.
Status = Literal["added", "configured", "unchanged"]


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


@contextlib.contextmanager
def locked_repository(repository: Path) -> Iterator[None]:
    """Create the repository if missing, and keep other packaging processes out. After a failure, remove it if new."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(created_folder(repository))
            handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise write_error(repository, error, ANOTHER_FOLDER) from error
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # what killed processes left behind
        for parent in (repository.resolve().parent, repository.resolve()):
            for folder in abandoned(parent, f".{repository.resolve().name}.packaging-"):
                shutil.rmtree(folder, ignore_errors=True)
        yield


def write_changes(repository: Path, changes: Sequence[ModelChange], pages: Mapping[str, bytes]) -> None:
    """Write everything to a staging folder, then rename it into place; a failure undoes the renames.

    A server that reads the repository meanwhile sees complete versions only.
    """
    written = [change for change in changes if change.status != "unchanged"]
    if not written and not pages:
        return
    staging = staging_folder(repository)
    undo: list[Callable[[], object]] = []
    try:
        staging.mkdir()
        for change in written:
            write_content(change.content or {}, staging / change.name / str(change.version))
            write_content(change.files, staging / change.name)
        write_content(pages, staging)
        for path in [*(path for change in written for path in renames(repository, change)), *pages]:
            move(staging, repository, path, undo)
    except BaseException as error:
        for step in reversed(undo):
            step()
        if isinstance(error, OSError):
            raise write_error(repository, error, f"{ANOTHER_FOLDER}; nothing was changed") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def renames(repository: Path, change: ModelChange) -> list[str]:
    """Paths to rename into the repository, in this order: a new model as a whole, or what is new in its folder."""
    if not (repository / change.name).exists():
        return [change.name]
    version = [] if change.content is None else [str(change.version)]
    # the configuration last, after the files that it names
    files = sorted(change.files, key=lambda name: not name.startswith("warmup/"))
    return [f"{change.name}/{name}" for name in (*version, *files)]


def move(staging: Path, repository: Path, path: str, undo: list[Callable[[], object]]) -> None:
    """Rename a new folder, or a file over an old one, and add the steps that undo it."""
    source, target = staging / path, repository / path
    if not target.parent.exists():
        target.parent.mkdir()
        undo.append(target.parent.rmdir)
    if target.is_file():
        kept = staging / f".kept-{len(undo)}"
        os.link(target, kept)
        os.replace(source, target)
        undo.append(lambda: os.replace(kept, target))
    else:
        os.rename(source, target)
        undo.append(lambda: os.rename(target, source))


def staging_folder(repository: Path) -> Path:
    """A folder beside the repository, where no server reads; inside it if the parent is another file system or cannot
    be written."""
    name = f".{repository.resolve().name}.packaging-{os.getpid()}"
    parent = repository.resolve().parent
    beside = parent.stat().st_dev == repository.stat().st_dev and os.access(parent, os.W_OK)
    return (parent if beside else repository.resolve()) / name
