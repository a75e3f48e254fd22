"""SIGTERM, as `kill`, schedulers and containers send it, and SIGHUP, as a terminal that is closed: a command ends in
order and removes what is not finished.

Without this, Python ends at once and leaves temporary files behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

# Windows has no SIGHUP.
SIGNALS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__)


class Terminated(SystemExit):
    """A signal of SIGNALS has arrived. Nothing but the command line handles it, and a child process ends with it
    silently. code: the exit status, 128 and the number of the signal."""

    code: int

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def stop_behind(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """The signal that an error stands for: a module in C++ that one interrupts while it is imported raises ImportError
    from it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (KeyboardInterrupt, Terminated)):
        cause = cause.__cause__
    return cause


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process when its parent, which has this id, is killed. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """The handler. A second signal, which may come while the first one is being obeyed, ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(number)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Raise Terminated in the block when a signal of SIGNALS arrives, unless the program that runs the block handles or
    ignores it itself."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
