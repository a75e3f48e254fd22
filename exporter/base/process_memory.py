"""The memory of this process, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process. Raises OSError where there is no /proc."""
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{STATUS} has no field {field}")


def give_back_freed() -> None:
    """Have the C library return freed memory, which later allocations would otherwise reuse unnoticed."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Do not search for garbage in the block."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
