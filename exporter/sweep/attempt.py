"""One attempt at a cell: start its process, wait for it, and return the outcome."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import msgspec

from effexport.files import json_text
from effexport.plugins.building.toolchain import ending
from effexport.sweep.cell import Cell
from effexport.sweep.outcome import LOG, OUTCOME, REQUEST, Outcome

# Part of a log that is kept: enough for a traceback, small enough for a table of a thousand failures.
LOG_LINES, LOG_BYTES = 40, 8000
POLL_SECONDS = 0.1
# Time that a process gets to end after SIGTERM, before SIGKILL.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an attempt. seconds: its longest duration. artifact_bytes: size of the largest artifact."""

    seconds: float = 4 * 3600.0
    artifact_bytes: int = 16 * 10**9


@dataclass(frozen=True)
class Attempt:
    """A cell to build within `limits`. environment: variables that are added to the environment of its process.

    is_cancelled: called regularly; once it returns True, the process is ended and its outcome is not used.
    """

    cell: Cell
    limits: Limits
    environment: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = lambda: False


# The command of an attempt, without its last argument, the folder. -P: nothing is imported from the current folder.
COMMAND = (sys.executable, "-P", "-m", "effexport.sweep.child")

Work = Callable[[Attempt, Path], Outcome]


def run_attempt(attempt: Attempt, folder: Path) -> Outcome:
    """Build the cell in a separate process; afterwards `folder` has its artifact and its log.

    Whatever happens to that process becomes an Outcome. It ends, too, if this process is interrupted or killed.
    """
    request = {"cell": attempt.cell.to_dict(), "parent": os.getpid()}
    (folder / REQUEST).write_text(json_text(request), encoding="utf-8")
    started = time.monotonic()
    log = folder / LOG
    with log.open("wb") as stream:
        process = started_process(folder, attempt, stream)
        try:
            code = waited(process, started + attempt.limits.seconds, attempt.is_cancelled)
        finally:
            end(process)
    outcome = outcome_of_process(folder, code, attempt.limits)
    if outcome.status == "finished" and sum(outcome.files.values()) > attempt.limits.artifact_bytes:
        size, limit = sum(outcome.files.values()), attempt.limits.artifact_bytes
        reason = f"the artifact has {size:,} bytes; expected at most {limit:,}: raise --max-artifact"
        outcome = replace(outcome, status="failed", reason=reason)
    return replace(outcome, log=tail(log), seconds=round(time.monotonic() - started, 3))


def started_process(folder: Path, attempt: Attempt, stream: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [*COMMAND, str(folder.resolve())]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **attempt.environment}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # so that its child processes can be ended with it
    )


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


def outcome_of_process(folder: Path, code: int | None, limits: Limits) -> Outcome:
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
