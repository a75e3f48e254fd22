"""A sweep: finished cells are skipped, the others run, and every outcome is written at once."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from effexport.artifact import CheckSummary, EngineEntry
from effexport.base.errors import EffexportError
from effexport.base.formatting import megabytes, rough_duration, seconds
from effexport.bench.cells import ARTIFACT, CELLS, FAILED, LOG, Cell, Outcome, Store, failed
from effexport.bench.executors import POLL_SECONDS, Executor
from effexport.bench.grid import OnStep, Pace, SweepResults, SweepRow, made_now
from effexport.plugins.building.toolchain import first_line
from effexport.proof.check import METRIC


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
State = Literal["finished", "failed", "to run"]


@dataclass(frozen=True)
class SweepPlan:
    """All cells of the file with their states, and the cells to run now."""

    cells: Sequence[Cell]
    to_run: Sequence[Cell]
    states: dict[str, State]


def plan_of(store: Store, cells: Sequence[Cell], chosen: Sequence[Cell], *, retry_failed: bool) -> SweepPlan:
    """Decide which of the chosen cells run: no finished ones, failed ones only with `retry_failed`."""
    states: dict[str, State] = {}
    for cell in cells:
        states[cell.id] = "finished" if store.finished(cell) else "failed" if store.failed(cell) else "to run"
    again = ("failed", "to run") if retry_failed else ("to run",)
    return SweepPlan(cells, [cell for cell in chosen if states[cell.id] in again], states)


@dataclass
class Sweep:
    """A run in progress, in as many threads as the executor has jobs.

    not_run: reasons by cell id. new: ids of cells that finished in this run. attempts: number of attempts by cell id.
    """

    store: Store
    executor: Executor
    on_step: OnStep = lambda step: None
    clock: Callable[[], float] = time.monotonic
    not_run: dict[str, str] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells; return when each has finished, has failed, or cannot run. Raises KeyboardInterrupt."""
        self._pace = Pace(len(cells), self.on_step, self.clock)
        pool = ThreadPoolExecutor(self.executor.jobs, thread_name_prefix="sweep")
        try:
            left = {pool.submit(self._run, cell) for cell in cells}
            while left:
                # not without an end: a signal that comes just before a wait does not interrupt it
                done, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                for one in done:
                    one.result()
        finally:
            self._ended.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, cell: Cell) -> None:
        """Attempt a cell until it has finished, has failed, or cannot run."""
        if self.store.damage(cell):
            shutil.rmtree(self.store.cell_folder(cell), ignore_errors=True)

        def started(where: str) -> None:
            with self._lock:
                self._started.add(cell.id)
                self._say(cell, f"running on {where}")

        is_lost = True
        while is_lost and not self._ended.is_set():
            self.attempts[cell.id] = self.attempts.get(cell.id, 0) + 1
            folder = self.store.staging(cell)
            outcome = self.executor.run(cell, folder, started, self._ended.is_set)
            with self._lock:
                self._started.discard(cell.id)
                if self._ended.is_set():
                    return
                is_lost = self._record(cell, self.attempts[cell.id], folder, outcome)
            shutil.rmtree(folder, ignore_errors=True)  # a published artifact has been moved out of it

    def _record(self, cell: Cell, attempt: int, folder: Path, outcome: Outcome) -> bool:
        """Write down the end of an attempt. Returns true if the cell is to begin again."""
        if outcome.status == "lost":
            self.store.log_attempt(cell, attempt, "lost", outcome)
            if attempt < MAX_LOSSES:
                self._say(cell, "lost with its node; starting again")
                return True
            outcome = failed(f"its node or worker was lost {attempt} times, most recently: {outcome.reason}")
        self._pace.pay(1)
        if outcome.status == "not run":
            self.not_run[cell.id] = outcome.reason
        elif outcome.status == "finished":
            try:
                won = self.store.publish(cell, folder, attempt, outcome)
                self.new.add(cell.id)
            except (EffexportError, OSError) as error:
                outcome = failed(f"its artifact did not arrive completely: {error}", outcome.where, outcome.log)
            else:
                end = "finished" if won else "finished earlier by another attempt"
                self._say(cell, f"{end} in {rough_duration(outcome.seconds)}")
                return False
        if outcome.status == "failed" and self.store.finished(cell) is None:
            self.store.fail(cell, attempt, outcome)
        self._say(cell, f"{outcome.status}: {first_line(outcome.reason, 'unknown reason')}")
        return False

    def _say(self, cell: Cell, text: str) -> None:
        self._pace.say(f"{cell.title}: {text}", len(self._started))


def results_of_sweep(
    plan: SweepPlan, store: Store, sweep: Sweep, *, command_of_cell: Callable[[str], str], **known: Any
) -> SweepResults:
    """The results of a run, with one row for every cell of the file, also for cells that an earlier run finished."""
    rows = tuple(row_of(cell, plan, store, sweep, command_of_cell(cell.id)) for cell in plan.cells)
    return SweepResults(rows=rows, **made_now(), **known)


def row_of(cell: Cell, plan: SweepPlan, store: Store, sweep: Sweep, command: str) -> SweepRow:
    spec, known = cell.spec, {name: getattr(cell, name) for name in ("id", "label", "target", "gpu")}
    known |= {"variant": spec.attention.variant, "scope": spec.model.scope, "seq_len": spec.model.seq_len}
    known |= {"batch": spec.batch, "precision": spec.precision, "command": command}
    if record := store.finished(cell):
        folder, is_new = f"{CELLS}/{cell.id}", cell.id in sweep.new
        known |= {"status": "finished", "artifact": f"{folder}/{ARTIFACT}"}
    elif cell.id in sweep.not_run:
        return SweepRow(**known, status="not run", reason=sweep.not_run[cell.id])
    elif record := store.failed(cell):
        folder, is_new = f"{FAILED}/{cell.id}", cell.id in sweep.attempts
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
