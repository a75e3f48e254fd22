"""A sweep: finished cells are skipped, the others run, and every outcome is written at once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal

from effexport.artifact import CheckSummary, EngineEntry
from effexport.base.disk import write_error
from effexport.base.errors import EffexportError
from effexport.base.files import csv_text, json_text, write_file
from effexport.base.formatting import (
    NOTHING,
    counted,
    duration,
    listed,
    megabytes,
    memory,
    number,
    rough_duration,
    seconds,
)
from effexport.bench.cells import ARTIFACT, CELLS, FAILED, LOG, Cell, Outcome, Store
from effexport.bench.executors import Event, Executor
from effexport.bench.findings import places_of
from effexport.bench.grid import made_now
from effexport.plugins.building.toolchain import first_line
from effexport.proof.check import METRIC
from effexport.render.document import (
    Chart,
    Code,
    Column,
    Document,
    Facts,
    Item,
    Line,
    Link,
    PlotLine,
    Quantity,
    Section,
    Sentence,
    Table,
    chart_of,
    columns_and_lines,
    present,
)
from effexport.render.formats import html_from_document

FORMAT_VERSION = 1
Status = Literal["finished", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class SweepRow:
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

    rows: tuple[SweepRow, ...]
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


# A node may fail while a cell runs; if this happens repeatedly, the cell is probably the cause.
MAX_LOSSES = 3
WAIT_SECONDS = 1.0
State = Literal["finished", "failed", "to run"]


@dataclass(frozen=True)
class SweepPlan:
    """All cells of the file with their states, and the cells to run now."""

    cells: Sequence[Cell]
    to_run: Sequence[Cell]
    states: dict[str, State]


def plan_of(
    store: Store, cells: Sequence[Cell], *, retry_failed: bool, only: Sequence[Cell] | None = None
) -> SweepPlan:
    """Decide which cells run: no finished ones, failed ones only with `retry_failed`. only: the requested cells."""
    states: dict[str, State] = {}
    for cell in cells:
        if store.finished(cell) is not None:
            states[cell.id] = "finished"
        else:
            states[cell.id] = "failed" if store.failed(cell) is not None else "to run"
    again = ("failed", "to run") if retry_failed else ("to run",)
    chosen = cells if only is None else only
    return SweepPlan(cells, [cell for cell in chosen if states[cell.id] in again], states)


@dataclass(frozen=True)
class Progress:
    """Progress of a sweep. text: the last event. done, total: cells. seconds_left: None if unknown or over."""

    text: str
    done: int
    total: int
    running: int
    seconds_left: float | None


@dataclass
class Sweep:
    """A run in progress.

    not_run: reasons by cell id. new: ids of cells that finished in this run. attempts: number of attempts by cell id.
    """

    store: Store
    executor: Executor
    on_progress: Callable[[Progress], None] = lambda progress: None
    clock: Callable[[], float] = time.monotonic
    not_run: dict[str, str] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    _open: dict[str, Cell] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _total: int = 0
    _begin: float = 0.0

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells; return when each has finished, has failed, or cannot run. Raises KeyboardInterrupt."""
        self._total, self._begin = len(cells), self.clock()
        for cell in cells:
            self._open[cell.id] = cell
            self._submit(cell)
        while self._open:
            for event in self.executor.wait(WAIT_SECONDS):
                self._handle(event)

    def _submit(self, cell: Cell) -> None:
        if self.store.damage(cell):
            shutil.rmtree(self.store.cell_folder(cell), ignore_errors=True)
        self.attempts[cell.id] = self.attempts.get(cell.id, 0) + 1
        self.executor.submit(cell, self.store.staging(cell))

    def _handle(self, event: Event) -> None:
        cell = event.cell
        if cell.id not in self._open:
            return
        if event.kind == "started":
            self._started.add(cell.id)
            self._say(f"{cell.title}: running on {event.where}")
        elif event.kind == "lost":
            self._lost(event)
        elif event.kind == "unplaceable":
            self.not_run[cell.id] = event.reason
            self._close(cell, f"not run: {event.reason}")
        elif event.outcome is not None:
            self._ended(event, event.outcome)
        if event.folder is not None:
            shutil.rmtree(event.folder, ignore_errors=True)  # a published artifact has been moved out of it

    def _ended(self, event: Event, outcome: Outcome) -> None:
        cell, attempt = event.cell, self.attempts[event.cell.id]
        if outcome.status == "finished" and event.folder is not None:
            try:
                won = self.store.publish(cell, event.folder, attempt, outcome)
            except (EffexportError, OSError) as error:
                reason = f"its artifact did not arrive completely: {error}"
                outcome = Outcome(status="failed", reason=reason, where=outcome.where, log=outcome.log)
            else:
                self.new.add(cell.id)
                text = "finished" if won else "finished earlier by another attempt"
                self._close(cell, f"{text} in {rough_duration(outcome.seconds)}")
                return
        self._fail(cell, outcome)

    def _fail(self, cell: Cell, outcome: Outcome) -> None:
        if self.store.finished(cell) is None:
            self.store.fail(cell, self.attempts[cell.id], outcome)
        self._close(cell, f"failed: {first_line(outcome.reason, 'unknown reason')}")

    def _lost(self, event: Event) -> None:
        cell, attempt = event.cell, self.attempts[event.cell.id]
        self._started.discard(cell.id)
        self.store.log_attempt(cell, attempt, "lost", Outcome(status="failed", reason=event.reason, where=event.where))
        if attempt < MAX_LOSSES:
            self._say(f"{cell.title}: lost with its node; starting again")
            self._submit(cell)
        else:
            reason = f"its node or worker was lost {attempt} times, most recently: {event.reason}"
            self._fail(cell, Outcome(status="failed", reason=reason))

    def _close(self, cell: Cell, text: str) -> None:
        del self._open[cell.id]
        self._started.discard(cell.id)
        self._say(f"{cell.title}: {text}")

    def _say(self, text: str) -> None:
        done = self._total - len(self._open)
        left = None
        if done and self._open:
            elapsed = self.clock() - self._begin
            # on average, the running cells are half done
            left = elapsed / (done + len(self._started) / 2) * (len(self._open) - len(self._started) / 2)
        self.on_progress(Progress(text, done, self._total, len(self._started), left))


# A longer table is folded, so that the sections below it are easy to find.
MAX_OPEN_ROWS = 60
HOW = (
    "Parity is the verdict of the cell's own report: the exported model was compared with PyTorch, and what fails is "
    "not written. “not run” means that no runtime there could run the model. The worst error is the largest max "
    "|error| / RMS of all its checks. The time is that of the process that built the cell, with its peak memory. An "
    "engine gives its version of TensorRT, the GPUs it is for, size, layers and how long it took to build; “run: not "
    "run” means that there was no GPU to run it on. Reports and logs are files in this folder."
)
# A column, and its text in a row; those of a cell that is not finished end with its state.
OF_CELL: tuple[tuple[Column, Callable[[SweepRow], str]], ...] = (
    (Column("Model", group="{}"), lambda row: row.label),
    (Column("Tokens", True), lambda row: f"{row.seq_len:,}"),
    (Column("Precision"), lambda row: row.precision),
    (Column("Target"), lambda row: row.target),
    (Column("GPU", below="{}"), lambda row: row.gpu),
)
OF_BUILD: tuple[tuple[Column, Callable[[SweepRow], str | Link]], ...] = (
    (Column("State", is_status=True), lambda row: row.status),
    (Column("Parity", is_status=True, below="parity: {}"), lambda row: row.parity),
    (Column("Worst error", True), lambda row: number(row.worst_error)),
    (Column("Limit", True, below="of {}"), lambda row: number(row.error_limit)),
    (Column("Time", True), lambda row: NOTHING if row.seconds is None else duration(row.seconds * 1000)),
    (Column("Memory", True, below="{}"), lambda row: memory(row.peak_bytes)),
    (Column("Size", True), lambda row: memory(row.model_bytes)),
    (Column("Engine"), lambda row: row.engine),
    (Column("Run", is_status=True, below="run: {}"), lambda row: row.engine and row.engine_parity),
    (Column("Report"), lambda row: Link("report", f"{row.artifact}/report.html")),
    (Column("Log", below="{}"), lambda row: Link("log", row.log)),
)


def document_from_results(results: SweepResults) -> Document:
    scopes, batches = {row.scope for row in results.rows}, {row.batch for row in results.rows}
    lead = [f"scope {scope}" for scope in scopes if len(scopes) == 1]
    lead += [f"batch {batch}" for batch in batches if len(batches) == 1]
    verdicts = [Sentence(results.sentence, results.verdict)]
    if not results.complete:
        verdicts.insert(0, Sentence("Interrupted: run the same command again to resume.", "not run"))
    problems = tuple(problem_of(row) for row in results.rows if row.status != "finished")
    place = Facts("Run", (("place", results.where or "nothing had to run"), ("this run", seconds(results.seconds))))
    chart = sweep_chart(results.rows)
    note = "Short bars are the limits of the errors in their colour. The time is that of the whole build."
    repeated = "What is finished is not built again, and what failed only with --retry-failed."
    versions = Facts("Versions", tuple(results.environment.items()))
    return Document(
        program="effexport sweep",
        title=f"Sweep: {results.name}",
        lead=", ".join(lead),
        created=results.created,
        verdicts=tuple(verdicts),
        sentences=(),
        parts=(),
        sections=(
            Section("Failed and not run", problems),
            Section("Error, size and time against length", (chart, note) if chart else (), is_background=True),
            Section("Every cell", (cells_table(results.rows),)),
            Section("What the columns say", (HOW,), is_background=True),
            Section("Where it ran", present(place, versions), is_background=True),
            Section("Repeat it", (repeated, Code(results.command)), is_background=True),
        ),
    )


def problem_of(row: SweepRow) -> Item:
    return Item(row.status, row.title, row.reason, row.log_tail, row.command)


def cells_table(rows: Sequence[SweepRow]) -> Table:
    """All cells, by variant with its options; columns that are empty in all rows are left out."""
    labels = list(dict.fromkeys(row.label for row in rows))
    ordered = sorted(rows, key=lambda row: labels.index(row.label))

    def reason_of(row: SweepRow) -> Line | None:
        return None if row.status == "finished" else Line((), row.status, row.reason.partition("\n")[0])

    columns, lines = columns_and_lines(OF_CELL, OF_BUILD, "State", ordered, reason_of)
    folded = f"{counted(len(rows), 'cell')} by variant"
    return Table("Every cell", columns, lines, "", folded, len(rows) <= MAX_OPEN_ROWS)


def sweep_chart(rows: Sequence[SweepRow]) -> Chart | None:
    """Errors with their limits, sizes and times against length; None if nothing was built for several lengths."""
    finished = [row for row in rows if row.status == "finished"]
    places = places_of([(row.precision, row.target, row.gpu) for row in finished])
    groups: dict[tuple[str, str], list[SweepRow]] = {}
    for row in finished:
        groups.setdefault((row.label, places[row.precision, row.target, row.gpu]), []).append(row)
    if all(len({row.seq_len for row in group}) < 2 for group in groups.values()):
        return None

    def lines(field: str, unit: float = 1.0, limit: str = "") -> list[PlotLine]:
        """The values of a field in some unit; a logarithmic axis has no 0."""

        def values(rows: Sequence[SweepRow], name: str) -> dict[int, float]:
            return {row.seq_len: getattr(row, name) / unit for row in rows if name and getattr(row, name)}

        return [PlotLine(*key, values(rows, field), values(rows, limit)) for key, rows in groups.items()]

    return chart_of(
        "sweep",
        {
            Quantity("Worst error against length", "max |error| / RMS", number): lines(
                "worst_error", limit="error_limit"
            ),
            Quantity("Size of the model against length", "megabytes", "{:.3g} MB".format): lines("model_bytes", 1e6),
            Quantity("Time of the build against length", "seconds", "{:.3g} s".format): lines("seconds"),
        },
    )


JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
# Columns of the CSV file: every field of a row but the log, which has many lines.
COLUMNS = tuple(field.name for field in fields(SweepRow) if field.name != "log_tail")


def results_of_sweep(
    plan: SweepPlan, store: Store, sweep: Sweep | None, *, command_of_cell: Callable[[str], str], **known: Any
) -> SweepResults:
    """The results, with one row for every cell of the file, also for cells that an earlier run finished.

    sweep: the run that has just ended; None if nothing had to run.
    """
    rows = tuple(row_of(cell, plan, store, sweep, command_of_cell(cell.id)) for cell in plan.cells)
    return SweepResults(rows=rows, **made_now(), **known)


def row_of(cell: Cell, plan: SweepPlan, store: Store, sweep: Sweep | None, command: str) -> SweepRow:
    spec, known = cell.spec, {name: getattr(cell, name) for name in ("id", "label", "target", "gpu")}
    known |= {"variant": spec.attention.variant, "scope": spec.model.scope, "seq_len": spec.model.seq_len}
    known |= {"batch": spec.batch, "precision": spec.precision, "command": command}
    if record := store.finished(cell):
        folder, is_new = f"{CELLS}/{cell.id}", sweep is not None and cell.id in sweep.new
        known |= {"status": "finished", "artifact": f"{folder}/{ARTIFACT}"}
    elif sweep and cell.id in sweep.not_run:
        return SweepRow(**known, status="not run", reason=sweep.not_run[cell.id])
    elif record := store.failed(cell):
        folder, is_new = f"{FAILED}/{cell.id}", sweep is not None and cell.id in sweep.attempts
        known |= {"status": "failed"}
    else:
        is_asked = any(cell.id == other.id for other in plan.to_run)
        reason = "the sweep was interrupted before it finished" if is_asked else "left out by --only"
        return SweepRow(**known, status="not run", reason=reason)
    known |= {name: getattr(record, name) for name in ("reason", "seconds", "peak_bytes", "where")}
    known |= {"is_new": is_new, "attempts": record.attempt, "log": f"{folder}/{LOG}", "log_tail": record.log}
    if record.results:
        parity, engine = record.results.parity, record.results.engine
        known |= {name: getattr(record.results, name) for name in ("artifact_bytes", "model_bytes")}
        known |= {"parity": "passed" if parity.passed else "not run"}
        known["worst_error"], known["error_limit"] = worst_of_summary(parity.summary)
        if engine:
            known |= {"engine": engine_text(engine), "engine_parity": engine_parity(parity.summary, engine.target)}
    return SweepRow(**known)


def write_results(results: SweepResults, folder: Path) -> None:
    """Write each file completely or not at all. Raises UserError."""
    texts = {
        JSON: results.to_json(),
        CSV: csv_text(COLUMNS, map(attrgetter(*COLUMNS), results.rows)),
        PAGE: html_from_document(document_from_results(results)),
    }
    try:
        for name, text in texts.items():
            write_file(folder / name, text)
    except OSError as error:
        raise write_error(folder, error, "move the folder; it has the finished cells") from error
