"""Requests that run in a process of their own: to build a cell of a sweep, or to measure the peak memory of a case of a
benchmark. A crash or a lack of memory then affects only one of them.

`python -m effexport.bench.child FOLDER` reads request.json of the folder and writes outcome.json, and an artifact if it
builds one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from effexport.base.errors import EffexportError, StageError, UserError
from effexport.base.files import json_text, write_file
from effexport.base.machine import peak_bytes_of, process_peak_bytes
from effexport.base.runtimes import RUNTIMES
from effexport.bench.cells import ARTIFACT, LOG, OUTCOME, REQUEST, Cell, Outcome, deciding_versions
from effexport.bench.grid import BenchCase
from effexport.models.validation import SpecError
from effexport.plugins.building.toolchain import ending

if TYPE_CHECKING:
    from effexport.base.dtypes import Array
    from effexport.bench.candidates import Candidate

# Made before any thread reads, as base/records.py says.
OUTCOMES = msgspec.json.Decoder(Outcome)
# Part of a log that is kept: enough for a traceback, small enough for a table of a thousand failures.
LOG_LINES, LOG_BYTES = 40, 8000
POLL_SECONDS = 0.1
# Time that a process gets to end after SIGTERM, before SIGKILL.
GRACE_SECONDS = 5.0
# A case that takes this long while its memory is measured is stuck.
STUCK_SECONDS = 900.0


class MemoryUnknownError(Exception):
    """The process that measures memory failed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """CellLimits of an attempt. seconds: its longest duration. artifact_bytes: size of the largest artifact."""

    seconds: float = 4 * 3600.0
    artifact_bytes: int = 16 * 10**9


@dataclass(frozen=True)
class Attempt:
    """A cell to build within `limits`. environment: variables that are added to the environment of its process.

    is_cancelled: called regularly; once it returns True, the process is ended and its outcome is not used.
    """

    cell: Cell
    limits: CellLimits
    environment: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = lambda: False


# The command of an attempt, without its last argument, the folder. -P: nothing is imported from the current folder.
COMMAND = (sys.executable, "-P", "-m", "effexport.bench.child")

Work = Callable[[Attempt, Path], Outcome]


def run_attempt(attempt: Attempt, folder: Path) -> Outcome:
    """Build the cell in a separate process; afterwards `folder` has its artifact and its log."""
    request = {"cell": attempt.cell.to_dict()}
    outcome = run_request(request, folder, attempt.limits, attempt.environment, attempt.is_cancelled)
    size, limit = sum(outcome.files.values()), attempt.limits.artifact_bytes
    if outcome.status == "finished" and size > limit:
        reason = f"the artifact has {size:,} bytes; expected at most {limit:,}: raise --max-artifact"
        return replace(outcome, status="failed", reason=reason)
    return outcome


def run_request(
    request: Mapping[str, Any],
    folder: Path,
    limits: CellLimits,
    environment: Mapping[str, str],
    is_cancelled: Callable[[], bool],
) -> Outcome:
    """Do what a request asks for in a separate process; its log is in `folder`.

    Whatever happens to that process becomes an Outcome. It ends, too, if this process is interrupted or killed.
    """
    write_file(folder / REQUEST, json_text({**request, "parent": os.getpid()}))
    started = time.monotonic()
    log = folder / LOG
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*COMMAND, str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **environment},
            start_new_session=True,  # so that its child processes can be ended with it
        )
        try:
            code = waited(process, started + limits.seconds, is_cancelled)
        finally:
            end(process)
    outcome = outcome_of_process(folder, code, limits)
    return replace(outcome, log=tail(log), seconds=round(time.monotonic() - started, 3))


def peak_memory(case: BenchCase, model: Path | None, *, threads: int, memory_arena: bool) -> int:
    """Peak bytes of a case of a benchmark. Raises MemoryUnknownError when its process fails."""
    request = {
        "case": asdict(case),
        "model": str(model) if model else None,
        "threads": threads,
        "memory_arena": memory_arena,
    }
    with tempfile.TemporaryDirectory(prefix="effexport-bench-") as folder:
        outcome = run_request(request, Path(folder), CellLimits(seconds=STUCK_SECONDS), {}, lambda: False)
    if outcome.peak_bytes is None or outcome.status == "failed":
        raise MemoryUnknownError(outcome.reason.partition(";")[0])
    return outcome.peak_bytes


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


def outcome_of_process(folder: Path, code: int | None, limits: CellLimits) -> Outcome:
    here = platform.node()
    if code is None:
        return Outcome(status="failed", reason=f"took longer than {limits.seconds:g} s; raise --timeout", where=here)
    try:
        return OUTCOMES.decode((folder / OUTCOME).read_bytes())
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


_PR_SET_PDEATHSIG = 1


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    die_with_parent(request["parent"])
    outcome = outcome_of_request(request, folder / ARTIFACT)
    write_file(folder / OUTCOME, json_text(asdict(outcome)))


def die_with_parent(parent: int) -> None:
    """End this process when its parent is killed, because nobody needs the result then. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def outcome_of_request(request: dict[str, Any], output: Path) -> Outcome:
    """Do what is asked for. An error becomes the reason of the outcome; unexpected ones are also in the log."""
    known: dict[str, Any] = {"where": f"{platform.node()}, process {os.getpid()}"}
    try:
        if "case" in request:
            return Outcome(status="finished", peak_bytes=peak_bytes_of_case(request), **known)
        cell = Cell.from_dict(request["cell"])
        here = deciding_versions(cell.target)
        known["versions"] = dict(here)
        check_versions(cell, here)
        check_gpu(cell)
        build(cell, output)
    except (EffexportError, SpecError) as error:
        stage = error.stage if isinstance(error, StageError) else ""
        return Outcome(status="failed", reason=str(error), stage=stage, peak_bytes=process_peak_bytes(), **known)
    except Exception as error:  # libraries may raise anything, and other cells must go on
        traceback.print_exc()
        reason = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        return Outcome(status="failed", reason=reason, peak_bytes=process_peak_bytes(), **known)
    files = {str(path.relative_to(output)): path.stat().st_size for path in output.rglob("*") if path.is_file()}
    return Outcome(status="finished", files=files, peak_bytes=process_peak_bytes(), **known)


def build(cell: Cell, output: Path) -> None:
    from effexport.options import BuildOptions
    from effexport.pipeline.build import artifact_from_spec

    engines = () if cell.engine is None else (cell.engine,)
    artifact_from_spec(cell.spec, output, BuildOptions(engines=engines, progress=print_stage))


def print_stage(name: str, share: float | None) -> None:
    if share is None:
        print(f"… {name}", flush=True)


def check_versions(cell: Cell, here: Any) -> None:
    """Raises UserError if this node has other versions than the cell's hash, and so might build something else."""
    for name, wanted in cell.versions.items():
        found = here.get(name)
        if wanted is not None and found is not None and found != wanted:
            raise UserError(
                f"this node has {name} {found}, the sweep was started with {wanted}; install the same version on all "
                "nodes"
            )


def check_gpu(cell: Cell) -> None:
    """Raises UserError if the GPU of this process does not have the architecture of the cell."""
    if not cell.needs_gpu or not cell.gpu:
        return
    from effexport.tensorrt.cuda import current_compute_capability

    found = current_compute_capability("tensorrt")
    if f"sm_{found}" != cell.gpu:
        raise UserError(
            f"the GPU of this process is sm_{found}, the cell is for {cell.gpu}; give the resource {cell.gpu} only to "
            "nodes whose GPUs all have that architecture"
        )


RUNS = 2


def peak_of_candidate(candidate: Candidate, feeds: dict[str, Array], device: str) -> int:
    """Peak memory of binding the inputs and some runs; on a GPU, memory of the device."""
    from effexport.bench.candidates import TorchCandidate

    def work() -> None:
        candidate.bind(feeds)
        for _ in range(RUNS):
            candidate.run()

    if device == "cuda":
        return device_bytes_of(work)
    if isinstance(candidate, TorchCandidate):
        # compilers and libraries allocate once, which is not part of the model
        work()
        candidate.release()
    return peak_bytes_of(work)


def device_bytes_of(work: Callable[[], object]) -> int:
    """Device memory that `work` takes: what its allocators hold at the end."""
    import torch

    cuda: Any = torch.cuda
    before = cuda.mem_get_info()[0]
    work()
    return max(0, int(before - cuda.mem_get_info()[0]))


def peak_bytes_of_case(request: dict[str, Any]) -> int:
    """The peak memory of a case. request: case, model (path or null), threads, memory_arena."""
    case, model = BenchCase(**request["case"]), request["model"]
    if not RUNTIMES[case.runtime].graph:
        import torch

        torch.set_num_threads(request["threads"])
    from effexport.bench.candidates import candidate_from_case, inputs_of_case

    feeds = inputs_of_case(case)
    candidate = candidate_from_case(
        case, Path(model) if model else None, threads=request["threads"], memory_arena=request["memory_arena"]
    )
    return peak_of_candidate(candidate, feeds, RUNTIMES[case.runtime].device)


if __name__ == "__main__":
    main()
