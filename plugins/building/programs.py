"""How a build runs other programs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a program did. problem: why it failed, in one line; None if it succeeded."""

    output: str
    errors: str
    problem: str | None


def run_program(*command: str, timeout_s: float, cwd: Path | None = None) -> Run:
    """Run without input, with messages in English; a program that does not start or end in time is a problem too."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Run("", "", str(error))
    return Run(done.stdout, done.stderr, ending(done.returncode) if done.returncode else None)


def ending(code: int) -> str:
    """How a process ended: with an exit status, or by a signal."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def run_logged(command: list[str], log: Path, timeout_s: float) -> str | None:
    """Run with all output appended to the log file; why it failed, or None.

    The output goes to a file because a pipe would keep us waiting for background processes that inherit it.
    """
    with log.open("ab") as stream:
        stream.write(f"$ {shlex.join(command)}\n".encode())
        stream.flush()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return ending(done.returncode) if done.returncode else None


def first_line(text: str, otherwise: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), otherwise)


def last_line(text: str, otherwise: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), otherwise)
