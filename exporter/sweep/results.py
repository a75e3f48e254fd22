"""The results of a sweep, row by row, for its table, its files and its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any, Literal

from effexport.artifact import CheckSummary, EngineEntry
from effexport.files import json_text
from effexport.proof.check import METRIC
from effexport.sweep.cell import Cell
from effexport.sweep.store import CellRecord
from effexport.units import counted, listed, megabytes, seconds

FORMAT_VERSION = 1
Status = Literal["finished", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell and its result.

    parity: the verdict of its report: passed, or "not run" if no runtime there could run the model. worst_error: the
    largest max |error| / RMS; error_limit: its limit. engine_parity: "" without an engine. seconds: of the last
    attempt. artifact, log: paths relative to the folder of the sweep, or "". command: runs this cell only.
    """

    id: str
    label: str
    variant: str
    scope: str
    seq_len: int
    batch: int
    precision: str
    target: str
    gpu: str
    status: Status
    command: str
    reason: str = ""
    is_new: bool = False
    parity: str = ""
    worst_error: float | None = None
    error_limit: float | None = None
    engine: str = ""
    engine_parity: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    artifact_bytes: int | None = None
    model_bytes: int | None = None
    where: str = ""
    attempts: int = 0
    artifact: str = ""
    log: str = ""
    log_tail: str = ""

    @property
    def title(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ""
        return f"{self.label}, {self.seq_len} tokens, {self.precision}, {self.target}{gpu}"


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """The results of a sweep. complete: False after an interrupt. where: the executor. seconds: of this run only."""

    rows: tuple[Row, ...]
    name: str
    created: str
    command: str
    where: str = ""
    seconds: float = 0.0
    complete: bool = True
    environment: Mapping[str, Any] = field(default_factory=dict)

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def verdict(self) -> str:
        """ "passed", "failed", or "not run" if some cells did not run."""
        if self.count("failed"):
            return "failed"
        return "passed" if self.count("finished") == len(self.rows) else "not run"

    @property
    def sentence(self) -> str:
        """The sweep in one line."""
        parts = [f"{self.count(status)} {status}" for status in ("finished", "failed", "not run") if self.count(status)]
        new = sum(row.is_new for row in self.rows if row.status == "finished")
        old = self.count("finished") - new
        before = f" ({new} now, {old} before)" if new and old else " (all before)" if old else ""
        return f"{counted(len(self.rows), 'cell')}: {listed(parts)}{before}"

    def to_json(self) -> str:
        values = {name: value for name, value in asdict(self).items() if name != "rows"}
        summary = {status: self.count(status) for status in ("finished", "failed", "not run")}
        rows = [asdict(row) for row in self.rows]
        return json_text({"format_version": FORMAT_VERSION, **values, "summary": summary, "cells": rows})


def row_of_cell(cell: Cell, status: Status, command: str, **known: Any) -> Row:
    known |= {name: getattr(cell, name) for name in ("id", "label", "target", "gpu")}
    spec, model = cell.spec, cell.spec.model
    known |= {"variant": spec.attention.variant, "scope": model.scope, "seq_len": model.seq_len}
    known |= {"batch": spec.batch, "precision": spec.precision}
    return Row(status=status, command=command, **known)


def fields_of_record(record: CellRecord) -> dict[str, Any]:
    """The fields of a row that come from the record of its cell."""
    known: dict[str, Any] = {name: getattr(record, name) for name in ("reason", "seconds", "peak_bytes", "where")}
    known |= {"attempts": record.attempt, "log_tail": record.log or ""}
    if not record.results:
        return known
    parity, engine = record.results.parity, record.results.engine
    worst, limit = worst_of_summary(parity.summary)
    return known | {
        "parity": "passed" if parity.passed else "not run",
        "worst_error": worst,
        "error_limit": limit,
        "artifact_bytes": record.results.artifact_bytes,
        "model_bytes": record.results.model_bytes,
        "engine": engine_text(engine) if engine else "",
        "engine_parity": engine_parity(parity.summary, engine.target) if engine else "",
    }


def worst_of_summary(summary: Mapping[str, CheckSummary]) -> tuple[float | None, float | None]:
    """The largest relative error of any check, and its limit."""
    found = [
        (float(entry.worst), float(entry.limit))
        for entry in summary.values()
        if entry.metric == METRIC and entry.worst is not None and entry.limit is not None
    ]
    return max(found, key=itemgetter(0), default=(None, None))


def engine_text(engine: EngineEntry) -> str:
    """`1.7.1, SM 89, 0.3 MB, 12 layers, 0.4 s`."""
    built_for = ", ".join(f"SM {number}" for number in engine.compute_capabilities) or "SM 80 and later"
    size, time = megabytes(engine.bytes), seconds(engine.build_seconds)
    return f"{engine.tensorrt_version}, {built_for}, {size}, {engine.layers} layers, {time}"


def engine_parity(summary: Mapping[str, CheckSummary], target: str) -> str:
    """The verdict of the checks that ran the engine; "not run" without a GPU for it."""
    entries = [entry for name, entry in summary.items() if name.startswith(f"{target}:")]
    if any(entry.failed for entry in entries):
        return "failed"
    return "passed" if any(entry.passed for entry in entries) else "not run"
