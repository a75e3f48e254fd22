"""cells → results: finished cells are skipped, the others run, and every outcome is written at once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from effexport.errors import EffexportError
from effexport.sweep.cell import Cell
from effexport.sweep.executor import Event, Executor
from effexport.sweep.outcome import Outcome
from effexport.sweep.store import Store
from effexport.units import rough_duration

# A node may fail while a cell runs; if this happens repeatedly, the cell is probably the cause.
MAX_LOSSES = 3
WAIT_SECONDS = 1.0
State = Literal["finished", "failed", "to run"]


@dataclass(frozen=True)
class Plan:
    """All cells of the file with their states, and the cells to run now."""

    cells: Sequence[Cell]
    to_run: Sequence[Cell]
    states: dict[str, State]


def plan_of(store: Store, cells: Sequence[Cell], *, retry_failed: bool, only: Sequence[Cell] | None = None) -> Plan:
    """Decide which cells run: no finished ones, failed ones only with `retry_failed`. only: the requested cells."""
    states: dict[str, State] = {}
    for cell in cells:
        if store.finished(cell) is not None:
            states[cell.id] = "finished"
        else:
            states[cell.id] = "failed" if store.failed(cell) is not None else "to run"
    again = ("failed", "to run") if retry_failed else ("to run",)
    chosen = cells if only is None else only
    return Plan(cells, [cell for cell in chosen if states[cell.id] in again], states)


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
            self._close(cell, f"{cell.title}: not run: {event.reason}")
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
                self._close(cell, f"{cell.title}: {text} in {rough_duration(outcome.seconds)}")
                return
        if self.store.finished(cell) is None:
            self.store.fail(cell, attempt, outcome)
        self._close(cell, f"{cell.title}: failed: {first_line(outcome.reason)}")

    def _lost(self, event: Event) -> None:
        cell, attempt = event.cell, self.attempts[event.cell.id]
        self._started.discard(cell.id)
        self.store.log_attempt(cell, attempt, "lost", Outcome(status="failed", reason=event.reason, where=event.where))
        if attempt < MAX_LOSSES:
            self._say(f"{cell.title}: lost with its node; starting again")
            self._submit(cell)
            return
        reason = f"its node or worker was lost {attempt} times, most recently: {event.reason}"
        self.store.fail(cell, attempt, Outcome(status="failed", reason=reason))
        self._close(cell, f"{cell.title}: failed: {first_line(reason)}")

    def _close(self, cell: Cell, text: str) -> None:
        del self._open[cell.id]
        self._started.discard(cell.id)
        self._say(text)

    def _say(self, text: str) -> None:
        done = self._total - len(self._open)
        left = None
        if done and self._open:
            elapsed = self.clock() - self._begin
            # on average, the running cells are half done
            left = elapsed / (done + len(self._started) / 2) * (len(self._open) - len(self._started) / 2)
        self.on_progress(Progress(text, done, self._total, len(self._started), left))


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown reason"
