"""Obeys scripts/portability.py in the environment of a Python tool: converts files, opens models and runs them.

    python python_worker.py URL

It asks the URL for a command, answers, and asks again, until the URL is gone.
"""

from __future__ import annotations

import http.client
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import conversions
import sessions
from messages import Arrays, packed, unpacked


class Worker:
    """The models that are open, by number, and the verbs of the commands."""

    def __init__(self) -> None:
        self._open: dict[int, sessions.Run] = {}

    def convert(self, arrays: Arrays, name: str, source: str, target: str) -> Arrays:
        conversions.CONVERSIONS[name](Path(source), Path(target), calibration_inputs(arrays))
        return {}

    def open(self, arrays: Arrays, number: int, runtime: str, **options: str) -> Arrays:
        self._open[number] = sessions.RUNTIMES[runtime](arrays["model"].tobytes(), **options)
        return {}

    def run(self, arrays: Arrays, number: int) -> Arrays:
        return self._open[number](arrays)

    def reset(self, arrays: Arrays) -> Arrays:
        self._open.clear()
        return {}

    def answer(self, message: bytes) -> bytes:
        header, arrays = unpacked(message)
        verb: Callable[..., Arrays] = getattr(self, header.pop("verb"))
        try:
            return packed({}, verb(arrays, **header))
        except Exception as error:  # whatever a tool raises is its answer
            return packed({"error": described(error), "trace": traceback.format_exc()}, {})


def described(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error}" if str(error).strip() else name


def calibration_inputs(arrays: Arrays) -> list[dict[str, np.ndarray]]:
    """Inputs of several runs, from arrays named `<run>/<input>`."""
    runs: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        run, _, own = name.partition("/")
        runs.setdefault(run, {})[own] = array
    return list(runs.values())


def end_with_parent() -> None:
    """End this process, whatever its tool is doing, soon after whoever started it has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    address = urlsplit(sys.argv[1])
    worker = Worker()
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    while True:
        try:
            connection.request("GET", "/command")
            message = connection.getresponse().read()
            if not message:
                return
            answer: Any = worker.answer(message)
            connection.request("POST", "/answer", answer)
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return  # whoever gave the commands has ended


if __name__ == "__main__":
    main()
