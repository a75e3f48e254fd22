"""Cells of a sweep, the outcomes of attempts at them, and the folder that keeps both, which docs/sweep.md describes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from effexport.artifact import EngineEntry, Parity, check_file, read_manifest
from effexport.base.disk import ANOTHER_FOLDER, write_error
from effexport.base.environment import PACKAGES
from effexport.base.errors import UserError
from effexport.base.files import json_text, only_writer, write_file
from effexport.base.records import values_of_file
from effexport.base.runtimes import RUNTIMES
from effexport.base.spec import BuildSpec
from effexport.bench.grid import now, title_of_cell
from effexport.tensorrt.spec import EngineSpec, Profile, parse_profile

# To be increased when the contents of a cell's folder change; cells of earlier formats are then rebuilt.
CELL_FORMAT = 1
ONNX_ONLY = "onnx"
# What writes the files of a cell and judges them, besides effexport; a cell of an engine also depends on its TensorRT.
_DECIDING = ("torch", "onnx", "onnxscript", "onnxruntime")
# 12 hexadecimal digits: among 10,000 cells, two alike are less likely than 1 in 5 million.
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model to build, and the GPU for its engine.

    label: the variant with its options, for tables. gpu: an architecture such as "sm_89", or "". Target trt builds on
    this GPU; target trt-rtx builds for it, on any machine.
    versions: of the packages that decide the result, without local parts such as +cpu; None: was not installed.
    """

    label: str
    spec: BuildSpec
    engine: EngineSpec | None = None
    gpu: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return self.engine.target if self.engine else ONNX_ONLY

    @property
    def needs_gpu(self) -> bool:
        return self.engine is not None and self.engine.row.built_where_it_runs

    @property
    def title(self) -> str:
        return title_of_cell(self.label, self.spec.model.seq_len, self.spec.precision, self.target, self.gpu)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the result, which the label does not."""
        values = {name: value for name, value in self.to_dict().items() if name != "label"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @cached_property
    def id(self) -> str:
        """The name of its folder: `lsh-512-fp32-trt-rtx-sm_89-0123456789ab`."""
        spec = self.spec
        words = (spec.attention.variant, str(spec.model.seq_len), spec.precision, self.target, self.gpu)
        return "-".join([*filter(None, words), self.digest[:_DIGITS]])

    def to_dict(self) -> dict[str, Any]:
        """The cell as JSON values, for `from_dict`."""
        engine = self.engine and {
            "target": self.engine.target,
            "profiles": [str(profile) for profile in self.engine.profiles],
            **self.engine.options(),
        }
        known = {"cell_format": CELL_FORMAT, "label": self.label, "spec": self.spec.to_dict(), "engine": engine}
        return {**known, "gpu": self.gpu, "versions": dict(self.versions)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """The inverse of `to_dict`. Raises SpecError, KeyError or TypeError for anything else."""
        engine, given = None, values["engine"]
        if given is not None:
            profiles = tuple(Profile(parse_profile(text)) for text in given["profiles"])
            numbers = tuple(given["compute_capabilities"])
            engine = EngineSpec(**{**given, "profiles": profiles, "compute_capabilities": numbers})
        known = {name: values[name] for name in ("label", "gpu", "versions")}
        return cls(spec=BuildSpec.from_dict(values["spec"]), engine=engine, **known)


@cache
def deciding_versions(target: str) -> Mapping[str, str | None]:
    """Versions of the packages that decide the result of a cell, found without importing them."""
    from effexport.base.version import __version__

    modules = (*_DECIDING, *([RUNTIMES[target].package.module] if target in RUNTIMES else []))
    found = {package.module: package.version for package in PACKAGES if package.module in modules}
    # 2.13.0 of 2.13.0+cpu, because builds of one release for different machines count as the same
    public = {name: version and version.partition("+")[0] for name, version in found.items()}
    return {"effexport": __version__, **public}


ARTIFACT, LOG, OUTCOME, REQUEST = "artifact", "log.txt", "outcome.json", "request.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an attempt: "finished" with an artifact; or, with a reason, "failed", "lost" with its node or
    worker, or "not run" because no node can run it.

    stage: the stage of the build that failed; "" if unknown. log: the end of the attempt's output. seconds: duration of
    the whole attempt. peak_bytes: peak memory of its process; None if it was killed. where: host and process.
    versions: of the packages that decide the result. files: size in bytes of every file of the artifact.
    """

    status: Literal["finished", "failed", "lost", "not run"]
    reason: str = ""
    stage: str = ""
    log: str = ""
    seconds: float = 0.0
    peak_bytes: int | None = None
    where: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def failed(reason: str, where: str = "", log: str = "") -> Outcome:
    return Outcome(status="failed", reason=reason, where=where, log=log)


FORMAT_VERSION = 1
MARK, RECORD, ATTEMPTS = "sweep.json", "record.json", "attempts.jsonl"
CELLS, FAILED, STAGING, SWEEP = "cells", "failed", ".staging", "sweep"


class CellResults(msgspec.Struct, frozen=True):
    """The part of a finished cell's manifest that tables show. engine: of the cell's target. artifact_bytes: of all
    files, with the golden values. model_bytes: of the model alone; records of an older effexport have none."""

    parity: Parity
    artifact_bytes: int
    engine: EngineEntry | None
    model_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CellRecord(Outcome):
    """record.json of a cell: the outcome of its last attempt, without the files of its artifact.

    log: of a failed attempt; a finished cell has log.txt. results: of a finished cell.
    """

    format_version: int = FORMAT_VERSION
    id: str
    digest: str
    cell: dict[str, Any]
    attempt: int
    ended: str
    results: CellResults | None = None


# Made before any thread reads, as base/records.py says.
RECORDS = msgspec.json.Decoder(CellRecord)


@dataclass(frozen=True)
class Store:
    """The output folder of a sweep. Reading changes nothing; `opened` creates it and keeps other sweeps out."""

    path: Path

    def cell_folder(self, cell: Cell) -> Path:
        return self.path / CELLS / cell.id

    def failed_folder(self, cell: Cell) -> Path:
        return self.path / FAILED / cell.id

    def finished(self, cell: Cell) -> CellRecord | None:
        """The record of a finished cell; None if it is not finished, or its artifact is damaged."""
        return None if self.damage(cell) else read_record(self.cell_folder(cell), cell)

    def failed(self, cell: Cell) -> CellRecord | None:
        """The record of the last failure of a cell that is not finished."""
        return read_record(self.failed_folder(cell), cell)

    def damage(self, cell: Cell) -> str:
        """A fault in the folder of a finished cell, or "". Compares the sizes of files."""
        folder = self.cell_folder(cell)
        if not folder.exists():
            return ""
        if read_record(folder, cell) is None:
            return f"{folder / RECORD} is missing or damaged"
        try:
            files = read_manifest(folder / ARTIFACT).files
        except UserError as error:
            return str(error)
        for name, entry in files.items():
            path = folder / ARTIFACT / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                return f"{path} is missing or its size has changed"
        return ""

    def check(self) -> None:
        """Raises UserError unless the path is the output of a sweep, an empty folder, or does not exist."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; expected the path of a folder to create")
        mark = self.path / MARK
        if not mark.is_file():
            # a sweep that is just starting, or was killed then, has made its folders and no mark yet; an older one had
            # its lock inside
            begun = (CELLS, FAILED, STAGING, ".lock", f".{SWEEP}.lock")
            names = (path.name for path in self.path.iterdir())
            if all(name in begun or name.startswith(f".{MARK}.partial-") for name in names):
                return
            raise UserError(f"{self.path} is not the output of a sweep, and not empty; choose another folder with -o")
        version = values_of_file(mark, ANOTHER_FOLDER).get("format_version")
        if type(version) is not int or version > FORMAT_VERSION:
            raise UserError(
                f"{mark} has format version {version}; this effexport reads up to {FORMAT_VERSION}: upgrade"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        """Create the folder and lock it, so that no other sweep writes to it. Raises UserError."""
        self.check()
        with contextlib.ExitStack() as stack:
            try:
                for name in (CELLS, FAILED, STAGING):
                    (self.path / name).mkdir(parents=True, exist_ok=True)
                # inside, because the folder may be a volume at several places, below one that nobody may write
                stack.enter_context(only_writer(self.path / SWEEP, self.path))
                write_file(self.path / MARK, json_text({"format_version": FORMAT_VERSION}))
            except OSError as error:
                raise write_error(self.path, error, ANOTHER_FOLDER) from error
            stack.callback(self._clear)
            self._clear()
            yield self

    def _clear(self) -> None:
        """Remove what an interrupted or killed sweep left behind."""
        for path in (self.path / STAGING).iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def staging(self, cell: Cell) -> Path:
        """A new folder for one attempt, on the same file system as its destination."""
        folder = self.path / STAGING / f"{cell.id}-{uuid.uuid4().hex}"
        folder.mkdir()
        return folder

    def publish(self, cell: Cell, staged: Path, attempt: int, outcome: Outcome) -> bool:
        """Publish a finished attempt by one rename, artifact and record together.

        The first attempt wins: returns False if another attempt had already finished the cell.
        Raises UserError if the artifact does not match its own manifest.
        """
        manifest = read_manifest(staged / ARTIFACT)
        for name, entry in manifest.files.items():
            check_file(staged / ARTIFACT, name, entry)
        engine = next((engine for engine in manifest.engines if engine.target == cell.target), None)
        all_bytes = sum(entry.bytes for entry in manifest.files.values())
        results = CellResults(manifest.parity, all_bytes, engine, manifest.model_bytes)
        for path in list(staged.iterdir()):
            if path.name not in (ARTIFACT, LOG):
                path.unlink()
        write_record(staged, cell, attempt, outcome, results)
        won = True
        try:
            staged.rename(self.cell_folder(cell))
        except OSError:  # the system does not replace a folder that is not empty
            won = False
            if not self.cell_folder(cell).is_dir():
                raise
        shutil.rmtree(self.failed_folder(cell), ignore_errors=True)
        self.log_attempt(cell, attempt, "finished" if won else "discarded", outcome)
        return won

    def fail(self, cell: Cell, attempt: int, outcome: Outcome) -> None:
        """Record a failure, replacing an earlier one of the same cell."""
        staged = self.staging(cell)
        write_record(staged, cell, attempt, outcome)
        shutil.rmtree(self.failed_folder(cell), ignore_errors=True)
        staged.rename(self.failed_folder(cell))
        self.log_attempt(cell, attempt, "failed", outcome)

    def log_attempt(self, cell: Cell, attempt: int, status: str, outcome: Outcome) -> None:
        """status: finished, discarded (another attempt was first), failed, or lost with its node."""
        line = {"cell": cell.id, "attempt": attempt, "status": status, "at": now()}
        line |= {name: getattr(outcome, name) for name in ("where", "seconds", "reason")}
        with (self.path / ATTEMPTS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def write_record(folder: Path, cell: Cell, attempt: int, outcome: Outcome, results: CellResults | None = None) -> None:
    """Write record.json, and the end of the log where the attempt has not left all of it."""
    if not (folder / LOG).exists():
        write_file(folder / LOG, outcome.log + "\n")
    known: dict[str, Any] = {"id": cell.id, "digest": cell.digest, "cell": cell.to_dict()}
    known |= vars(outcome) | {"attempt": attempt, "ended": now()}
    known |= {"files": {}, "log": outcome.log if outcome.status == "failed" else ""}
    write_file(folder / RECORD, json_text(msgspec.to_builtins(CellRecord(**known, results=results))))


def read_record(folder: Path, cell: Cell) -> CellRecord | None:
    """The record of a cell; None if it is missing, damaged, or of another cell."""
    try:
        record = RECORDS.decode((folder / RECORD).read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    return record if record.digest == cell.digest else None
