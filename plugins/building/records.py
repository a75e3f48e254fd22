"""The small files of the cache: their fields, and how they are read, strictly, and written, in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

Record = TypeVar("Record")


class BuiltOperator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator of the user's in a library: its row, and whether it has a CUDA kernel there."""

    torch_name: str
    onnx_name: str
    element_types: tuple[str, ...]
    cuda: bool


class BuildInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of build.json, the record of the library beside it.

    header_version is ORT_API_VERSION. compiler and nvcc are commands with their versions; for a library without CUDA
    kernels nvcc is None and cuda_architectures is empty. flags are the environment variables that CMake reads.
    operators: those of the user's, besides ours.
    """

    key: str
    source_hash: str
    installation: str
    machine: str
    header_version: int
    compiler: str
    nvcc: str | None
    cuda_architectures: tuple[int, ...]
    flags: dict[str, str]
    created: str
    seconds: float
    sha256: str
    bytes: int
    operators: tuple[BuiltOperator, ...] = ()

    @property
    def has_cuda(self) -> bool:
        return self.nvcc is not None


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An installation's choice of a build, made by `effexport plugins build`. folders: those given by --with."""

    installation: str
    key: Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z]+$")]
    selected_ns: int
    folders: tuple[str, ...] = ()


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a record, which must have exactly the fields of its type. Raises ValueError, with the name of the file, for
    whatever is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write in one step: other processes see the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
