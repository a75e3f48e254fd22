"""The small files of the cache: their fields, and how they are read, strictly, and written, in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True)
class BuildInfo:
    """Contents of build.json, the record of the library beside it.

    header_version is ORT_API_VERSION. compiler and nvcc are commands with their versions; for a library without CUDA
    kernels nvcc is None and cuda_architectures is empty. flags are the environment variables that CMake reads.
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

    @property
    def has_cuda(self) -> bool:
        return self.nvcc is not None


@dataclass(frozen=True)
class Selection:
    """An installation's choice of a build, made by `effexport plugins build`."""

    installation: str
    key: str
    selected_ns: int


def parse_build_info(text: str) -> BuildInfo:
    """The record in the text, which must have exactly the fields of BuildInfo. Raises ValueError."""
    optional_text = (str, type(None))
    types: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("key", "source_hash", "installation", "machine", "compiler", "created", "sha256"), (str,)),
        "header_version": (int,),
        "bytes": (int,),
        "seconds": (int, float),
        "nvcc": optional_text,
        "cuda_architectures": (list,),
        "flags": (dict,),
    }
    value = _fields(text, types)
    if not all(type(item) is int for item in value["cuda_architectures"]):
        raise ValueError("cuda_architectures is not a list of integers")
    if not all(type(item) is str for item in value["flags"].values()):
        raise ValueError("flags has a value that is not text")
    return BuildInfo(**value | {"cuda_architectures": tuple(value["cuda_architectures"])})


def parse_selection(text: str) -> Selection:
    selection = Selection(**_fields(text, {"installation": (str,), "key": (str,), "selected_ns": (int,)}))
    if not selection.key.isalnum():
        raise ValueError(f"{selection.key!r} is not the key of a build")
    return selection


def _fields(text: str, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"expected an object with the fields {', '.join(sorted(types))}")
    for name, allowed in types.items():
        if type(value[name]) not in allowed:
            raise ValueError(f"{name} is {value[name]!r}; expected {' or '.join(t.__name__ for t in allowed)}")
    return value


def read_record(path: Path, parse: Callable[[str], Record]) -> Record:
    """Read and parse a small file. Raises ValueError, with its name, for whatever is wrong with it."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write in one step: other processes see the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
