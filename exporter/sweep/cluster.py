"""Cells as Ray tasks, on a cluster or on this machine.

Ray places every cell and reports lost nodes; it never retries by itself, so that every attempt is counted. Artifacts
come back in pieces through Ray's object store, so the nodes need no shared disk.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from effexport.errors import EffexportError
from effexport.files import abandoned
from effexport.sweep.attempt import Attempt, Limits, Work, run_attempt
from effexport.sweep.cell import Cell
from effexport.sweep.executor import Event
from effexport.sweep.outcome import ARTIFACT, Outcome
from effexport.sweep.packing import Piece, Unpacking, pieces_of_folder
from effexport.units import listed

# A cell needs a node with this resource, in any amount; GPUs and CPUs limit how many cells run there.
ARCHITECTURE_SHARE = 0.001
# Pieces of an artifact that a node sends ahead.
PIECES_AHEAD = 4
# Time between two looks at the nodes while cells wait for one.
LOOK_SECONDS = 1.0
PREFIX = "effexport-sweep-"
# Resources whose amount matters, by Ray's names.
COUNTED = ("CPU", "GPU")


def attempt_of_task(cell: dict[str, Any], limits: Limits, work: Work) -> Iterator[Any]:
    """Run on a node: yield its name, then the outcome, then the pieces of the artifact."""
    yield platform.node()
    for left in abandoned(Path(tempfile.gettempdir()), PREFIX):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        outcome = work(Attempt(Cell.from_dict(cell), limits), Path(folder))
        yield asdict(outcome)
        if outcome.status == "finished":
            yield from pieces_of_folder(Path(folder) / ARTIFACT)


@dataclass
class Running:
    """A task in progress. unplaceable_since: when it was first seen that no node could run it."""

    cell: Cell
    stream: Any
    folder: Path
    outcome: Outcome | None = None
    unpacking: Unpacking | None = None
    is_started: bool = False
    unplaceable_since: float | None = None


class RayExecutor:
    """An executor on Ray. wait_seconds: how long a cell waits for a suitable node. cpus: per cell."""

    def __init__(
        self, ray: Any, title: str, limits: Limits, *, cpus: float, wait_seconds: float, work: Work = run_attempt
    ) -> None:
        self._ray, self._limits, self._cpus, self._wait_seconds = ray, limits, cpus, wait_seconds
        self._work = ray.put(work)
        self._task = ray.remote(attempt_of_task)
        self._running: dict[Any, Running] = {}
        self._looked = 0.0
        self.title = title

    def demands(self, cell: Cell) -> dict[str, float]:
        """The resources that a node must have, by Ray's names."""
        gpu = {"GPU": 1.0} if cell.needs_gpu else {}
        return {"CPU": self._cpus, **gpu, **({cell.gpu: ARCHITECTURE_SHARE} if gpu and cell.gpu else {})}

    def submit(self, cell: Cell, folder: Path) -> None:
        demands = self.demands(cell)
        options = {
            "name": cell.id,
            "num_cpus": demands.pop("CPU"),
            "num_gpus": demands.pop("GPU", 0),
            "resources": demands,
            "max_retries": 0,
            "num_returns": "streaming",
            "_generator_backpressure_num_objects": PIECES_AHEAD,
        }
        stream = self._task.options(**options).remote(cell.to_dict(), self._limits, self._work)
        self._running[stream] = Running(cell, stream, folder)

    def wait(self, seconds: float) -> Sequence[Event]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=min(seconds, LOOK_SECONDS))
        events = [event for stream in ready for event in self._next(self._running[stream])]
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            events += self._unplaceable()
        return events

    def _next(self, task: Running) -> Iterator[Event]:
        """Take the next message of a task."""
        try:
            message = self._ray.get(next(task.stream))
        except StopIteration:
            yield self._ended(task)
            return
        except self._ray.exceptions.RayTaskError as error:
            # raised by our code on the node, or before the node reached it
            yield self._failed(task, f"on its node: {short(error)}")
            return
        except self._ray.exceptions.OutOfMemoryError as error:
            yield self._failed(task, f"its node ran out of memory: {short(error)}")
            return
        except self._ray.exceptions.RayError as error:
            del self._running[task.stream]
            yield Event(kind="lost", cell=task.cell, reason=short(error), folder=task.folder)
            return
        try:
            if isinstance(message, str):
                task.is_started = True
                yield Event(kind="started", cell=task.cell, where=message)
            elif isinstance(message, Piece) and task.unpacking is not None:
                task.unpacking.add(message)
            else:
                task.outcome = msgspec.convert(message, Outcome)
                task.unpacking = Unpacking(task.folder / ARTIFACT, task.outcome.files)
        except (EffexportError, OSError, msgspec.ValidationError) as error:
            self._ray.cancel(task.stream)
            yield self._failed(task, str(error))

    def _ended(self, task: Running) -> Event:
        outcome = task.outcome or Outcome(status="failed", reason="its task ended without an outcome")
        if outcome.status == "finished" and task.unpacking is not None:
            try:
                task.unpacking.finish()
            except EffexportError as error:
                return self._failed(task, str(error))
        del self._running[task.stream]
        return Event(kind="ended", cell=task.cell, outcome=outcome, folder=task.folder)

    def _failed(self, task: Running, reason: str) -> Event:
        del self._running[task.stream]
        outcome = Outcome(status="failed", reason=reason)
        return Event(kind="ended", cell=task.cell, outcome=outcome, folder=task.folder)

    def _unplaceable(self) -> Iterator[Event]:
        """Events for cells that have waited too long for a node. They were submitted anyway, so that an autoscaling
        cluster can add a node."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        now = time.monotonic()
        for task in [task for task in self._running.values() if not task.is_started]:
            demands = self.demands(task.cell)
            if any(all(node.get(name, 0.0) >= amount for name, amount in demands.items()) for node in nodes):
                task.unplaceable_since = None
                continue
            task.unplaceable_since = task.unplaceable_since or now
            if now - task.unplaceable_since >= self._wait_seconds:
                self._ray.cancel(task.stream)
                del self._running[task.stream]
                waited = f" within {self._wait_seconds:g} s" if self._wait_seconds else ""
                reason = f"no node with {demanded(demands)}{waited}; the nodes have: {offered(nodes)}"
                yield Event(kind="unplaceable", cell=task.cell, reason=reason, folder=task.folder)

    def close(self) -> None:
        for stream in self._running:
            self._ray.cancel(stream)
        self._running.clear()
        self._ray.shutdown()


def demanded(demands: Mapping[str, float]) -> str:
    """`1 CPU, 1 GPU and the resource sm_90`."""
    words = [f"{demands[name]:g} {name}" for name in demands if name in COUNTED]
    words += [f"the resource {name}" for name in demands if name not in COUNTED]
    return listed(words)


def offered(nodes: Sequence[Mapping[str, float]]) -> str:
    """The resources of the nodes, grouped."""
    texts = []
    for node in nodes:
        names = [name for name in node if name in COUNTED or name.startswith("sm_")]
        texts.append(" ".join(f"{node[name]:g} {name}" for name in sorted(names)) or "nothing")
    return "; ".join(f"{texts.count(text)} × {text}" for text in dict.fromkeys(texts)) or "there are no nodes"


def short(error: BaseException) -> str:
    """One line for an error of Ray, whose message may be a whole traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
