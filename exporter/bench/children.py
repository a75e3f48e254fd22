"""Cells in child processes: one attempt, and several at a time on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from effexport.bench.cell import LOG, OUTCOME, REQUEST, Cell, Outcome
from effexport.bench.results import Case
from effexport.environment import memory_info, usable_cores
from effexport.files import json_text, write_file
from effexport.plugins.building.toolchain import Gpu, ending, gpus_here

# Part of a log that is kept: enough for a traceback, small enough for a table of a thousand failures.
LOG_LINES, LOG_BYTES = 40, 8000
POLL_SECONDS = 0.1
# Time that a process gets to end after SIGTERM, before SIGKILL.
GRACE_SECONDS = 5.0


# A case that takes this long while its memory is measured is stuck.
STUCK_SECONDS = 900.0


class MemoryUnknownError(Exception):
    """The process that measures memory failed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """CellLimits of an attempt. seconds: its longest duration. artifact_bytes: size of the largest artifact."""

    seconds: float = 4 * 3600.0
    artifact_bytes: int = 16 * 10**9


@dataclass(frozen=True)
class Attempt:
    """A cell to build within `limits`. environment: variables that are added to the environment of its process.

    is_cancelled: called regularly; once it returns True, the process is ended and its outcome is not used.
    """

    cell: Cell
    limits: CellLimits
    environment: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = lambda: False


# The command of an attempt, without its last argument, the folder. -P: nothing is imported from the current folder.
COMMAND = (sys.executable, "-P", "-m", "effexport.bench.child")

Work = Callable[[Attempt, Path], Outcome]


def run_attempt(attempt: Attempt, folder: Path) -> Outcome:
    """Build the cell in a separate process; afterwards `folder` has its artifact and its log."""
    request = {"cell": attempt.cell.to_dict()}
    outcome = run_request(request, folder, attempt.limits, attempt.environment, attempt.is_cancelled)
    size, limit = sum(outcome.files.values()), attempt.limits.artifact_bytes
    if outcome.status == "finished" and size > limit:
        reason = f"the artifact has {size:,} bytes; expected at most {limit:,}: raise --max-artifact"
        return replace(outcome, status="failed", reason=reason)
    return outcome


def run_request(
    request: Mapping[str, Any],
    folder: Path,
    limits: CellLimits,
    environment: Mapping[str, str],
    is_cancelled: Callable[[], bool],
) -> Outcome:
    """Do what a request asks for in a separate process, see `child.py`; its log is in `folder`.

    Whatever happens to that process becomes an Outcome. It ends, too, if this process is interrupted or killed.
    """
    write_file(folder / REQUEST, json_text({**request, "parent": os.getpid()}))
    started = time.monotonic()
    log = folder / LOG
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*COMMAND, str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **environment},
            start_new_session=True,  # so that its child processes can be ended with it
        )
        try:
            code = waited(process, started + limits.seconds, is_cancelled)
        finally:
            end(process)
    outcome = outcome_of_process(folder, code, limits)
    return replace(outcome, log=tail(log), seconds=round(time.monotonic() - started, 3))


def peak_memory(case: Case, model: Path | None, *, threads: int, memory_arena: bool) -> int:
    """Peak bytes of a case of a benchmark. Raises MemoryUnknownError when its process fails."""
    request = {
        "case": asdict(case),
        "model": str(model) if model else None,
        "threads": threads,
        "memory_arena": memory_arena,
    }
    with tempfile.TemporaryDirectory(prefix="effexport-bench-") as folder:
        outcome = run_request(request, Path(folder), CellLimits(seconds=STUCK_SECONDS), {}, lambda: False)
    if outcome.peak_bytes is None or outcome.status == "failed":
        raise MemoryUnknownError(outcome.reason.partition(";")[0])
    return outcome.peak_bytes


def waited(process: subprocess.Popen[bytes], deadline: float, is_cancelled: Callable[[], bool]) -> int | None:
    """The exit status; None after the deadline or a cancellation."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_SECONDS)
        if time.monotonic() > deadline or is_cancelled():
            return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            if number == signal.SIGKILL or process.returncode is not None:
                return


def outcome_of_process(folder: Path, code: int | None, limits: CellLimits) -> Outcome:
    here = platform.node()
    if code is None:
        return Outcome(status="failed", reason=f"took longer than {limits.seconds:g} s; raise --timeout", where=here)
    try:
        return msgspec.json.decode((folder / OUTCOME).read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):
        return Outcome(status="failed", reason=reason_of_exit(code), where=here)


def reason_of_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit status {code} without an outcome; see the log"
    name = ending(code)
    hint = "; most likely the system ran out of memory" if name == "SIGKILL" else "; see the log"
    return f"its process was ended by {name}{hint}"


def tail(log: Path) -> str:
    """The end of a log."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LOG_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a cell.

    kind: started; ended, with an outcome; lost, with its node or worker; unplaceable, because no node can run it.
    folder: the folder given to `submit` once nothing more is written to it; it has the artifact of a finished cell.
    """

    kind: Literal["started", "ended", "lost", "unplaceable"]
    cell: Cell
    where: str = ""
    reason: str = ""
    outcome: Outcome | None = None
    folder: Path | None = None


class Executor(Protocol):
    """Something that runs cells. title: its name in words."""

    @property
    def title(self) -> str: ...

    def submit(self, cell: Cell, folder: Path) -> None:
        """Start or queue an attempt; its artifact goes into `folder`, which is empty."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """The events since the last call; waits up to `seconds` for the first one."""
        ...

    def close(self) -> None:
        """End everything that still runs."""
        ...


# Memory for building the default encoder, with room to spare.
CELL_BYTES = 2 * 2**30


class ClosedError(Exception):
    """The sweep has ended, so the cell is not started."""


@dataclass
class ProcessExecutor:
    """An executor on this machine. jobs: cells at a time. work: runs an attempt. A GPU runs one cell."""

    limits: CellLimits
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
