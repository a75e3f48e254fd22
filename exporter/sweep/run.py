"""cells → results: what is finished is skipped, what is not runs, and everything that happens is written at once."""

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

# A node may die under a cell; one that dies under the same cell again and again is being killed by it.
MAX_LOSSES = 3
WAIT_SECONDS = 1.0
State = Literal["finished", "failed", "to run"]


@dataclass(frozen=True)
class Plan:
    """Every cell of the file, and those of them that are to run now."""

    cells: Sequence[Cell]
    to_run: Sequence[Cell]
    states: dict[str, State]


def plan_of(store: Store, cells: Sequence[Cell], *, retry_failed: bool, only: Sequence[Cell] | None = None) -> Plan:
    """Finished cells are left alone, and failed ones too unless `retry_failed`. only: the cells that were asked for."""
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
class News:
    """For whoever watches. text: what happened. done, total: cells. seconds_left: None while nobody knows."""

    text: str
    done: int
    total: int
    running: int
    seconds_left: float | None


@dataclass
class Sweep:
    """A run in progress.

    not_run: why, by cell. new: ids of the cells that finished in this run. attempts: how often each was begun.
    """

    store: Store
    executor: Executor
    on_news: Callable[[News], None] = lambda news: None
    clock: Callable[[], float] = time.monotonic
    not_run: dict[str, str] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    _open: dict[str, Cell] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _total: int = 0
    _begin: float = 0.0

    def run(self, cells: Sequence[Cell]) -> None:
        """Returns when every cell has finished, has failed, or cannot run. Raises what interrupts it."""
        self._total, self._begin = len(cells), self.clock()
        for cell in cells:
            self._open[cell.id] = cell
            self._submit(cell)
        while self._open:
            for event in self.executor.wait(WAIT_SECONDS):
                self._handle(event)

    def _submit(self, cell: Cell) -> None:
        if self.store.damage(cell):
            self.store.remove_damaged(cell)
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
            shutil.rmtree(event.folder, ignore_errors=True)  # what was published is elsewhere by now

    def _ended(self, event: Event, outcome: Outcome) -> None:
        cell, attempt = event.cell, self.attempts[event.cell.id]
        if outcome.status == "finished" and event.folder is not None:
            try:
                won = self.store.publish(cell, event.folder, attempt, outcome)
            except (EffexportError, OSError) as error:
                reason = f"its artifact did not arrive whole: {error}"
                outcome = Outcome(status="failed", reason=reason, where=outcome.where, log=outcome.log)
            else:
                self.new.add(cell.id)
                text = "finished" if won else "finished by another attempt, which was first"
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
            self._say(f"{cell.title}: lost with its node, and begun again")
            self._submit(cell)
            return
        reason = f"its node or worker was lost {attempt} times, the last time by: {event.reason}"
        self.store.fail(cell, attempt, Outcome(status="failed", reason=reason))
        self._close(cell, f"{cell.title}: failed: {first_line(reason)}")

    def _close(self, cell: Cell, text: str) -> None:
        del self._open[cell.id]
        self._started.discard(cell.id)
        self._say(text)

    def _say(self, text: str) -> None:
        done = self._total - len(self._open)
        left = None
        if done:
            elapsed = self.clock() - self._begin
            # the cells that run now are half done, on average
            left = elapsed / (done + len(self._started) / 2) * (len(self._open) - len(self._started) / 2)
        self.on_news(News(text, done, self._total, len(self._started), left))


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "for no known reason"
