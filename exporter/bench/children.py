"""Child processes that build a cell of a sweep, or measure the peak memory of a case of a benchmark; see `child.py`,
which imports what builds and so is not imported here."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from effexport.base.files import json_text, write_file
from effexport.bench.cells import LOG, OUTCOME, REQUEST, Outcome, failed
from effexport.bench.grid import BenchCase
from effexport.plugins.building.toolchain import ending

# Made before any thread reads, as base/records.py says.
OUTCOMES = msgspec.json.Decoder(Outcome)
# Part of a log that is kept: enough for a traceback, small enough for a table of a thousand failures.
LOG_LINES, LOG_BYTES = 40, 8000
POLL_SECONDS = 0.1
# Time that a process gets to end after SIGTERM, before SIGKILL.
GRACE_SECONDS = 5.0
# A case that takes this long while its memory is measured is stuck.
STUCK_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """Limits of an attempt. seconds: its longest duration. artifact_bytes: size of the largest artifact."""

    seconds: float = 4 * 3600.0
    artifact_bytes: int = 16 * 10**9


@dataclass(frozen=True)
class Attempt:
    """A request to a process of its own: {"cell": …} to build it, {"case": …} to measure its memory.

    environment: variables that are added to that of the process.
    is_cancelled: called regularly; once it returns True, the process is ended and its outcome is not used.
    """

    request: Mapping[str, Any]
    limits: CellLimits
    environment: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = lambda: False


# The command of an attempt, without its last argument, the folder. -P: nothing is imported from the current folder.
COMMAND = (sys.executable, "-P", "-m", "effexport.bench.child")

Work = Callable[[Attempt, Path], Outcome]


def run_attempt(attempt: Attempt, folder: Path) -> Outcome:
    """Do what a request asks for in a separate process; afterwards `folder` has its log, and the artifact of a cell.

    Whatever happens to that process becomes an Outcome. It ends, too, if this process is interrupted or killed.
    """
    write_file(folder / REQUEST, json_text({**attempt.request, "parent": os.getpid()}))
    started = time.monotonic()
    limits, log = attempt.limits, folder / LOG
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*COMMAND, str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **attempt.environment},
            start_new_session=True,  # so that its child processes can be ended with it
        )
        try:
            code = waited(process, started + limits.seconds, attempt.is_cancelled)
        finally:
            end(process)
    outcome = outcome_of_process(folder, code, limits)
    size = sum(outcome.files.values())
    if size > limits.artifact_bytes:
        reason = f"the artifact has {size:,} bytes; expected at most {limits.artifact_bytes:,}: raise --max-artifact"
        outcome = replace(outcome, status="failed", reason=reason)
    return replace(outcome, log=tail(log), seconds=round(time.monotonic() - started, 3))


def peak_memory(case: BenchCase, model: Path | None, *, threads: int, memory_arena: bool) -> Outcome:
    """The outcome of a process that measures the peak memory of a case of a benchmark."""
    known = {"model": model and str(model), "threads": threads, "memory_arena": memory_arena}
    attempt = Attempt({"case": asdict(case), **known}, CellLimits(seconds=STUCK_SECONDS))
    with tempfile.TemporaryDirectory(prefix="effexport-bench-") as folder:
        return run_attempt(attempt, Path(folder))


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
    if code is None:
        return failed(f"took longer than {limits.seconds:g} s; raise --timeout", platform.node())
    try:
        return OUTCOMES.decode((folder / OUTCOME).read_bytes())
    except (OSError, msgspec.DecodeError):
        return failed(reason_of_exit(code), platform.node())


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
