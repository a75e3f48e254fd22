"""Programs that a stage runs: each ends in time, with everything it has started."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# What an interrupted program may take to write its results.
GRACE_SECONDS = 3.0
# For the kernel to take away what a killed process had, on a GPU too.
KILL_SECONDS = 10.0


def run_program(
    command: Sequence[str], seconds: float = math.inf, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output. After so many seconds it is interrupted, then killed with its children.

    Raises TimeoutExpired, with all output as text, if it had to be.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
        # programs that nohup started ignore SIGINT, and so would their children
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    output, errors, in_time = "", "", True
    try:
        for wait, number in (
            (seconds, signal.SIGINT),
            (GRACE_SECONDS, signal.SIGKILL),
            (GRACE_SECONDS, signal.SIGKILL),
        ):
            try:
                output, errors = process.communicate(timeout=None if wait == math.inf else max(wait, 0.0))
                break
            except subprocess.TimeoutExpired:
                in_time = False
                kill_group(process.pid, number)
    finally:
        kill_group(process.pid, signal.SIGKILL)
        process.wait()
    if not in_time:
        raise subprocess.TimeoutExpired(command, seconds, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_session(session: int) -> None:
    """Kill all processes of a session, in whatever groups they are, and wait until they are gone."""
    deadline = time.time() + KILL_SECONDS
    while (numbers := list(members(session))) and time.time() < deadline:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)


def members(session: int) -> Iterator[int]:
    """The processes of a session that still run."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # the name, in parentheses, may contain anything
            state, _, _, own_session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(own_session) == session and state != "Z":
                yield int(stat.parent.name)
