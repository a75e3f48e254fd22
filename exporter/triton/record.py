"""effexport.json beside config.pbtxt: effexport's record of a packaged model. Triton does not read it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec

from effexport.dtypes import TensorInfo, check_tensors
from effexport.errors import UserError
from effexport.files import json_text
from effexport.records import record_from_values, values_of_file
from effexport.triton.signature import STRING, TEXT_INPUT
from effexport.triton.spec import SERVER_PATH, BackendName, PackageName

RECORD = "effexport.json"
CONFIG = "config.pbtxt"
FORMAT_VERSION = 1
REPACKAGE = "remove the model's folder and package it again"


class Origin(TypedDict):
    """What a version of a model was packaged from. example: the texts of an example request; {} without texts."""

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
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
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

    def text(self) -> str:
        return json_text(asdict(self))


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
    for kind, tensors in (("inputs", record.inputs), ("outputs", record.outputs)):
        if not tensors:
            raise UserError(f"{path} is damaged: it describes a model without {kind}; {REPACKAGE}")
    check_tensors((*record.inputs, *record.outputs), str(path), REPACKAGE, others=(STRING,))
    if record.name != folder.name:
        raise UserError(f"{path} is damaged: it describes the model {record.name!r}; {REPACKAGE}")
    return record


def config_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
