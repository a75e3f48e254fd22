"""Stages: the parts of a run, each in processes of its own, with a time limit and a JSON file for its result.

A result is written before the next stage begins, so that a run which is stopped loses one stage at most. A later run
into the same folder repeats what is missing, did not pass, or was found with other sources, on another device, or
without some of the operators.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from effexport.plugins.ops import CUDA_OPS
from gpu.device import Device
from gpu.programs import kill_session

if TYPE_CHECKING:
    from effexport.plugins.contract import Contract

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
# Work that a stage cannot finish within this share of its time limit, by its pace, is reported as not run.
SHARE_TO_USE = 0.85
# The limit of every stage in the emulation only ends what hangs: other programs may slow a machine down tenfold.
REHEARSAL_SECONDS = 1200
RUNNING = "stopped before its end"
LATE = "no time was left"
INTERRUPTED = "interrupted"
# How often a stage's process is looked at, in seconds: a signal ends a stage within that time.
POLL_SECONDS = 0.2
_interrupted = threading.Event()
T = TypeVar("T")
Found = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The inputs of a stage.

    results: the folder of the stages' JSON files. work: a folder for programs and large files, which may be lost.
    ops: names of operators. sources: the hash of everything that decides the results. end_before: the time, by
    time.time(), at which the stage should be done. hardware: the name of the GPU, or of the emulation.
    """

    device: Device
    results: Path
    work: Path
    ops: tuple[str, ...]
    sources: str
    end_before: float = float("inf")
    hardware: str = ""

    @property
    def seconds_left(self) -> float:
        return max(self.end_before - time.time(), 0.0)

    @property
    def contracts(self) -> dict[str, Contract]:
        """The contracts of the operators, by name. Loads PyTorch."""
        from effexport.plugins.contract import load_contract

        return {op.torch_name: load_contract(op) for op in CUDA_OPS.values() if op.torch_name in self.ops}

    def found_in_time(
        self, stage: str, key: str, pieces: Iterable[tuple[Found, Callable[[], Found]]], **known: Any
    ) -> list[Found]:
        """Findings of pieces of work, kept under a key as they come; without time for a piece, only its facts."""
        found: list[Found] = []
        for (facts, work), in_time in self.in_time(pieces):
            found.append(work() if in_time else {**facts, "problem": LATE})
            self.keep(stage, {**known, key: found})
            self.device.free_memory()
        return found

    def in_time(self, pieces: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Pieces of work, each with whether there is time for it: as much as the longest one before it took."""
        longest = 0.0
        for piece in pieces:
            begin = time.time()
            yield piece, self.seconds_left > longest
            longest = max(longest, time.time() - begin)

    def result_of(self, stage: str) -> Result | None:
        """The result in the folder, if it has these sources, this device and all of these operators."""
        value = _read(self.results / f"{stage}.json")
        if (value.get("sources"), value.get("hardware")) != (self.sources, self.hardware):
            return None
        if not set(self.ops) <= set(value["ops"]):
            return None
        return Result(value["status"], value["summary"], value["details"], value["table"])

    def keep(self, stage: str, details: dict[str, Any]) -> None:
        """Write what a stage has found so far, in case it is stopped. Returning a Result writes it too."""
        self.write(stage, Result(FAILED, RUNNING, details), 0.0)

    def write(self, stage: str, result: Result, seconds: float) -> None:
        known = {"stage": stage, "sources": self.sources, "hardware": self.hardware, "ops": self.ops}
        date = time.strftime("%Y-%m-%d", time.gmtime())
        value = {**known, "date": date, "seconds": round(seconds, 1), **asdict(result)}
        path = self.results / f"{stage}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)


@dataclass(frozen=True)
class Result:
    """The outcome of a stage: PASSED, FAILED or NOT_RUN, one line about it, and all its findings, as JSON.

    table: a short text for the end of the output.
    """

    status: str
    summary: str
    details: dict[str, Any]
    table: str = ""


@dataclass(frozen=True)
class Stage:
    """One part of a run.

    name: also that of its JSON file. seconds: its time limit on a GPU.
    work: "module:function", which takes a Run and returns a Result; only its process imports it, and PyTorch with it.
    processes: 0 for one process that takes all operators; otherwise every operator has one, so many at a time.
    """

    name: str
    about: str
    seconds: int
    work: str
    processes: int = 0

    def limit(self, device: Device) -> int:
        return REHEARSAL_SECONDS if device.emulated else self.seconds


def finite(value: Any) -> Any:
    """The value with texts in place of infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the stage that runs, with what it has found, and begin no other one."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: _interrupted.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():  # None if it was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _interrupted.clear()


def run_stages(run: Run, stages: Iterable[Stage]) -> Iterator[tuple[Stage, Result, float]]:
    """Run the stages in order; yields each with its result and its seconds. Earlier results are taken over."""
    for stage in stages:
        if _interrupted.is_set():
            return
        earlier = earlier_result(run, stage)
        if earlier is not None:
            yield stage, earlier, 0.0
            continue
        begin = time.time()
        result = run_stage(run, stage)
        seconds = time.time() - begin
        run.write(stage.name, result, seconds)
        yield stage, result, seconds


def earlier_result(run: Run, stage: Stage) -> Result | None:
    """The result that an earlier run has left, if it passed and this run would give the same."""
    result = run.result_of(stage.name) if run.work.is_dir() else None
    if result is None or result.status != PASSED:
        return None
    return replace(result, summary=f"{result.summary} (earlier run)")


def run_stage(run: Run, stage: Stage) -> Result:
    limit = stage.limit(run.device)
    deadline = time.time() + limit
    run = replace(run, end_before=time.time() + SHARE_TO_USE * limit)
    if not stage.processes:
        return run_process(run, stage, deadline)
    # the parts write into a folder of their own, because the results are few files
    parts = run.work / stage.name
    parts.mkdir(parents=True, exist_ok=True)

    def run_part(op: str) -> Result:
        (parts / op).mkdir(exist_ok=True)
        return run_process(replace(run, results=parts / op, ops=(op,)), stage, deadline)

    with ThreadPoolExecutor(stage.processes) as pool:
        results = dict(zip(run.ops, pool.map(run_part, run.ops), strict=True))
    return merged(results)


def worst_of(statuses: Iterable[str]) -> str:
    return min(statuses, key=(FAILED, NOT_RUN, PASSED).index)


def merged(results: dict[str, Result]) -> Result:
    """One result of the operators' own. It is as bad as the worst of them."""
    status = worst_of(result.status for result in results.values())
    bad = [f"{op}: {result.summary}" for op, result in results.items() if result.status != PASSED]
    details = {
        op: {"status": result.status, "summary": result.summary, **result.details} for op, result in results.items()
    }
    return Result(status, "; ".join(bad) or f"{len(results)} operators", {"ops": details})


def run_process(run: Run, stage: Stage, deadline: float) -> Result:
    """Run the stage in a process of its own, which is stopped with its children at the deadline."""
    path = run.results / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    seconds = deadline - time.time()
    if seconds <= 0 or _interrupted.is_set():
        return Result(NOT_RUN, INTERRUPTED if _interrupted.is_set() else LATE, {})
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(run, stage))
    process.start()
    try:
        while process.exitcode is None and time.time() < deadline and not _interrupted.is_set():
            process.join(POLL_SECONDS)
        ended = process.exitcode is not None
    finally:
        stop(process)
    if not ended:
        late = f"stopped at its time limit of {stage.limit(run.device)} s"
        return Result(FAILED, INTERRUPTED if _interrupted.is_set() else late, _details(path))
    if process.exitcode != 0:
        return Result(FAILED, f"its process ended with {process.exitcode}", _details(path))
    result = run.result_of(stage.name)
    assert result is not None, f"{stage.name} has written no result of this run"
    return result


def stop(process: SpawnProcess) -> None:
    """Stop the process if it still runs, and whatever it has started in any case."""
    assert process.pid is not None
    kill_session(process.pid)
    process.kill()  # which has no session of its own at first
    process.join()


def _read(path: Path) -> dict[str, Any]:
    """A stage's JSON; empty if there is none, or one that cannot be read: then the stage has to be repeated."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _details(path: Path) -> dict[str, Any]:
    return _read(path).get("details", {})


def _work(run: Run, stage: Stage) -> None:
    os.setsid()
    if run.device.emulated:  # threads that wait for each other are slow where others need the cores too
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.time()
    try:
        result = pkgutil.resolve_name(stage.work)(run)
    except Exception as error:
        print(f"{stage.name}:\n{traceback.format_exc()}", file=sys.stderr)
        kept = _details(run.results / f"{stage.name}.json")
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        result = Result(FAILED, summary, {**kept, "error": traceback.format_exc()})
    run.write(stage.name, result, time.time() - begin)
