"""SIGTERM, as `kill`, schedulers and containers send it: a command ends in order and removes what is not finished.

Without this, Python ends at once and leaves temporary files behind.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """SIGTERM has arrived. Nothing but the command line handles it, and a child process ends with it silently."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """The handler. A second signal, which may come while the first one is being obeyed, ends the process at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Raise Terminated in the block when SIGTERM arrives, unless the program that runs the block handles it itself."""
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
