"""Runs effexport's commands inside worker processes, and judges how each ended."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from effexport.base.machine import status_bytes

# Of a command that refuses what it was given, beyond what the process took before.
MOST_SECONDS = 2.0
MOST_BYTES = 200 << 20
# A case that takes longer hangs.
HANGS_AFTER_S = 120.0
WORKERS = 2
# A case: its index → the name of an expected outcome; raises AssertionError with what was wrong.
Case = Callable[[int], str]


@dataclass
class Tally:
    """Outcomes of the cases of one part.

    outcomes: how often each expected outcome occurred, by its name, such as "refused". problems: one line for each case
    that ended in any other way, with what repeats it.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.outcomes.total() + len(self.problems)


@dataclass(frozen=True)
class Ended:
    """The end of a command. error: an exception that nothing caught, or "". seconds: of the processor, which other
    programs do not take. grown_bytes: peak memory beyond that before."""

    words: Sequence[str]
    code: int
    out: str
    err: str
    error: str
    seconds: float
    grown_bytes: int

    def check(self) -> str:
        """The outcome, as exit statuses promise it. Raises AssertionError for a traceback, and for a refusal of more
        than one line or beyond its limits."""
        command = " ".join(self.words)
        assert not self.error, f"{command}: {self.error}"
        assert self.code in (0, 1, 2), f"{command}: exit status {self.code}"
        if self.code == 0:
            return "accepted"
        errors = [line for line in self.err.splitlines() if "error:" in line]
        if self.code == 1 and not errors:
            return "failed its checks"
        assert len(errors) == 1, f"{command}: not one line: {self.err[-500:]!r}"
        assert errors[0].startswith("effexport: error: "), f"{command}: {errors[0]}"
        assert len(errors[0]) < 2000, f"{command}: a line of {len(errors[0])} characters: {errors[0][:200]}"
        if self.code == 2:
            assert self.seconds < MOST_SECONDS, f"{command}: refused after {self.seconds:.1f} s: {errors[0]}"
            assert self.grown_bytes < MOST_BYTES, f"{command}: took {self.grown_bytes >> 20} MB: {errors[0]}"
            return "refused"
        return "failed its checks"


def run_command(words: Sequence[str]) -> Ended:
    """Run a command in this process, as the console script would."""
    from effexport.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    code, error = 0, ""
    before = reset_peak()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as bug:  # whatever else comes out of a command
            error = short(bug)
    seconds = time.process_time() - start
    grown = status_bytes("VmHWM") - before
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Ended([str(word) for word in words], code, *texts, error, seconds, grown)


def short(bug: BaseException) -> str:
    """An exception and the last place in effexport that it came through, in one line."""
    frames = traceback.extract_tb(bug.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{type(bug).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}: {str(bug)[:300]}"


def reset_peak() -> int:
    """Forget the peak of this process's memory, and return what it has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status_bytes("VmRSS")


def in_workers(cases: int, start: Callable[..., Case], *arguments: object, workers: int = WORKERS) -> Tally:
    """Run cases 0 … in worker processes, so that a crash or a hang costs one case and is known by its number.

    start: makes the function of a case, once for each worker, from the arguments and the worker's number.
    """
    context = get_context("spawn")
    tally = Tally()
    running: dict[int, tuple[Worker, Iterator[int]]] = {}
    pending = [iter(range(number, cases, workers)) for number in range(workers)]
    for number, indices in enumerate(pending):
        worker = Worker(context, start, arguments, number)
        if worker.next_case(indices):
            running[number] = worker, indices
        else:
            worker.finish()
    while running:
        for number, (worker, indices) in list(running.items()):
            ended = worker.ended()
            if ended is None:
                continue
            kind, text = ended
            if kind == "problem":
                tally.problems.append(text)
            else:
                tally.outcomes[text] += 1
            if not worker.is_alive:
                worker = Worker(context, start, arguments, number)
                running[number] = worker, indices
            if not worker.next_case(indices):
                worker.finish()
                del running[number]
    return tally


class Worker:
    """A process that runs one case after the other. It is replaced after a crash or a hang."""

    def __init__(self, context: object, start: Callable[..., Case], arguments: tuple[object, ...], number: int) -> None:
        self._pipe, end = context.Pipe()  # type: ignore[attr-defined]
        self._process = context.Process(target=work, args=(end, start, arguments, number), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        end.close()
        self._case, self._deadline, self.is_alive = -1, 0.0, True

    def next_case(self, indices: Iterator[int]) -> bool:
        self._case = next(indices, -1)
        if self._case < 0:
            return False
        self._deadline = time.monotonic() + HANGS_AFTER_S
        self._pipe.send(self._case)
        return True

    def ended(self) -> tuple[str, str] | None:
        """The outcome of the present case, or the problem with it; None while it runs."""
        try:
            if self._pipe.poll(0.02):
                found: tuple[str, str] = self._pipe.recv()
                return found
        except (EOFError, ConnectionResetError):
            self._process.join()
            self.is_alive = False
            code = self._process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return "problem", f"case {self._case}: the process ended with {how}"
        if time.monotonic() > self._deadline:
            self.stop()
            return "problem", f"case {self._case}: still running after {HANGS_AFTER_S:g} s"
        return None

    def finish(self) -> None:
        """Let the process end by itself, as it does where the pipe ends."""
        self._pipe.close()
        self._process.join(HANGS_AFTER_S)
        self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.is_alive = False


def work(pipe: Connection, start: Callable[..., Case], arguments: tuple[object, ...], number: int) -> None:
    """The main function of a worker."""
    os.environ["OMP_NUM_THREADS"] = "1"
    case = start(*arguments, number)
    while True:
        try:
            index = pipe.recv()
        except EOFError:
            sys.exit(0)
        try:
            pipe.send(("outcome", case(index)))
        except AssertionError as error:
            pipe.send(("problem", f"case {index}: {error}"))
        except Exception as bug:  # of the campaign itself: a problem as well
            pipe.send(("problem", f"case {index}: {short(bug)}"))
