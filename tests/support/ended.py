"""Waiting for the end of a process: a kill returns before the process is gone."""

from __future__ import annotations

import time
from pathlib import Path


def has_ended(pid: int, seconds: float = 10.0) -> bool:
    """Wait until a process is gone, or is a zombie, for which nobody waits; False after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
