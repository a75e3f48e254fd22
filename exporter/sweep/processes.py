"""Cells as plain processes on this machine, several at a time."""

from __future__ import annotations

import platform
import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from effexport.environment import memory_info, usable_cores
from effexport.plugins.building.toolchain import Gpu, gpus_here
from effexport.sweep.attempt import Attempt, Limits, Work, run_attempt
from effexport.sweep.cell import Cell
from effexport.sweep.executor import Event
from effexport.sweep.outcome import Outcome

# Memory for building the default encoder, with room to spare.
CELL_BYTES = 2 * 2**30


class ClosedError(Exception):
    """The sweep has ended, so the cell is not started."""


@dataclass
class ProcessExecutor:
    """An executor on this machine. jobs: cells at a time. work: runs an attempt. A GPU runs one cell."""

    limits: Limits
    jobs: int = 1
    work: Work = run_attempt
    gpus: tuple[Gpu, ...] = field(default_factory=gpus_here)
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="sweep")
        self._free = deque(self.gpus)
        self._gpu_returned = threading.Condition()

    @property
    def title(self) -> str:
        return f"this machine, {self.jobs} {'cell' if self.jobs == 1 else 'cells'} at a time"

    def submit(self, cell: Cell, folder: Path) -> None:
        if cell.needs_gpu and not any(fits(gpu, cell) for gpu in self.gpus):
            have = ", ".join(gpu.architecture for gpu in self.gpus) or "none"
            wanted = f"a GPU of {cell.gpu}" if cell.gpu else "a GPU"
            reason = f"no node with {wanted}: the GPUs of this machine are {have}; run it with --address on a cluster"
            self._events.put(Event(kind="unplaceable", cell=cell, reason=reason, folder=folder))
            return
        self._pool.submit(self._run, cell, folder)

    def _run(self, cell: Cell, folder: Path) -> None:
        gpu = None
        try:
            gpu = self._take_gpu(cell) if cell.needs_gpu else None
            if self._closed.is_set():
                return
            self._events.put(Event(kind="started", cell=cell, where=platform.node()))
            outcome = self.work(Attempt(cell, self.limits, self._environment(gpu), self._closed.is_set), folder)
            self._events.put(Event(kind="ended", cell=cell, outcome=outcome, folder=folder))
        except ClosedError:
            return
        except Exception as error:  # an error of one cell must not stop the others
            reason = f"{type(error).__name__}: {error}"
            outcome = Outcome(status="failed", reason=reason, where=platform.node())
            self._events.put(Event(kind="ended", cell=cell, outcome=outcome, folder=folder))
        finally:
            if gpu is not None:
                with self._gpu_returned:
                    self._free.append(gpu)
                    self._gpu_returned.notify_all()

    def _environment(self, gpu: Gpu | None) -> dict[str, str]:
        """Environment variables of an attempt: parallel cells share the cores."""
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self.jobs))} if self.jobs > 1 else {}
        return threads | ({"CUDA_VISIBLE_DEVICES": gpu.identifier} if gpu else {})

    def _take_gpu(self, cell: Cell) -> Gpu:
        with self._gpu_returned:
            while True:
                found = next((gpu for gpu in self._free if fits(gpu, cell)), None)
                if found is not None:
                    self._free.remove(found)
                    return found
                if self._closed.is_set():
                    raise ClosedError
                self._gpu_returned.wait(1.0)

    def wait(self, seconds: float) -> Sequence[Event]:
        try:
            return [self._events.get(timeout=seconds)]
        except queue.Empty:
            return []

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def fits(gpu: Gpu, cell: Cell) -> bool:
    return not cell.gpu or gpu.architecture == cell.gpu


def jobs_of_machine() -> int:
    """One cell per core, but no more than fit into the free memory."""
    free = memory_info().get("MemAvailable")
    return max(1, usable_cores() if free is None else min(usable_cores(), free // CELL_BYTES))
