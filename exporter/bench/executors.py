"""Attempts, each in a process of its own, and the executors of a sweep: on this machine, or as tasks of Ray.

The process of an attempt builds a cell, or measures the peak memory of a case of a benchmark; see `child.py`, which
imports what builds and so is not imported here. Ray places every cell and reports lost nodes; it never retries by
itself, so that every attempt is counted. Artifacts come back in pieces through Ray's object store, so the nodes need no
shared disk.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from effexport.artifact import files_of_folder
from effexport.base.environment import free_memory_bytes, usable_cores
from effexport.base.errors import EffexportError, MissingExtraError, UserError
from effexport.base.files import abandoned, json_text, write_file
from effexport.base.formatting import counted, listed
from effexport.bench.cells import ARTIFACT, LOG, OUTCOME, REQUEST, Cell, Outcome, failed
from effexport.bench.grid import BenchCase
from effexport.plugins.building.toolchain import Gpu, ending, first_line, gpus_here

# Made before any thread reads, as base/records.py says.
OUTCOMES = msgspec.json.Decoder(Outcome)
# Part of a log that is kept: enough for a traceback, small enough for a table of a thousand failures.
LOG_LINES, LOG_BYTES = 40, 8000
POLL_SECONDS = 0.1
# Time that a process gets to end after SIGTERM, before SIGKILL.
GRACE_SECONDS = 5.0
# A case that takes this long while its memory is measured is stuck.
STUCK_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """Limits of an attempt. seconds: its longest duration. artifact_bytes: size of the largest artifact."""

    seconds: float = 4 * 3600.0
    artifact_bytes: int = 16 * 10**9


@dataclass(frozen=True)
class Attempt:
    """A request to a process of its own: {"cell": …} to build it, {"case": …} to measure its memory.

    environment: variables that are added to that of the process.
    is_cancelled: called regularly; once it returns True, the process is ended and its outcome is not used.
    """

    request: Mapping[str, Any]
    limits: CellLimits
    environment: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = lambda: False


# The command of an attempt, without its last argument, the folder. -P: nothing is imported from the current folder.
COMMAND = (sys.executable, "-P", "-m", "effexport.bench.child")

Work = Callable[[Attempt, Path], Outcome]


def run_attempt(attempt: Attempt, folder: Path) -> Outcome:
    """Do what a request asks for in a separate process; afterwards `folder` has its log, and the artifact of a cell.

    Whatever happens to that process becomes an Outcome. It ends, too, if this process is interrupted or killed.
    """
    write_file(folder / REQUEST, json_text({**attempt.request, "parent": os.getpid()}))
    started = time.monotonic()
    limits, log = attempt.limits, folder / LOG
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*COMMAND, str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **attempt.environment},
            start_new_session=True,  # so that its child processes can be ended with it
        )
        try:
            code = waited(process, started + limits.seconds, attempt.is_cancelled)
        finally:
            end(process)
    outcome = outcome_of_process(folder, code, limits)
    size = sum(outcome.files.values())
    if size > limits.artifact_bytes:
        reason = f"the artifact has {size:,} bytes; expected at most {limits.artifact_bytes:,}: raise --max-artifact"
        outcome = replace(outcome, status="failed", reason=reason)
    return replace(outcome, log=tail(log), seconds=round(time.monotonic() - started, 3))


def peak_memory(case: BenchCase, model: Path | None, *, threads: int, memory_arena: bool) -> Outcome:
    """The outcome of a process that measures the peak memory of a case of a benchmark."""
    known = {"model": model and str(model), "threads": threads, "memory_arena": memory_arena}
    attempt = Attempt({"case": asdict(case), **known}, CellLimits(seconds=STUCK_SECONDS))
    with tempfile.TemporaryDirectory(prefix="effexport-bench-") as folder:
        return run_attempt(attempt, Path(folder))


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
    if code is None:
        return failed(f"took longer than {limits.seconds:g} s; raise --timeout", platform.node())
    try:
        return OUTCOMES.decode((folder / OUTCOME).read_bytes())
    except (OSError, msgspec.DecodeError):
        end = f"ended with {ending(code)} without an outcome" if code >= 0 else f"was ended by {ending(code)}"
        hint = "most likely the system ran out of memory" if code == -signal.SIGKILL else "see the log"
        return failed(f"its process {end}; {hint}", platform.node())


def tail(log: Path) -> str:
    """The end of a log."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LOG_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])


# (cell, folder for its log and its artifact, to be called with the node when it starts, true once nobody wants its
# outcome) → its outcome
Run = Callable[[Cell, Path, Callable[[str], None], Callable[[], bool]], Outcome]


@dataclass(frozen=True)
class Executor:
    """A place where cells run. title: its name in words. jobs: the most cells that it is given at a time.

    run: makes one attempt at a cell, and waits for its end. close: called after the last one.
    """

    title: str
    jobs: int
    run: Run
    close: Callable[[], object] = lambda: None


# Memory for building the default encoder, with room to spare.
CELL_BYTES = 2 * 2**30


def process_executor(
    limits: CellLimits, jobs: int | None, work: Work = run_attempt, gpus: Sequence[Gpu] | None = None
) -> Executor:
    """Runs cells on this machine, each in a process of its own. jobs: how many share the cores. A GPU runs one cell."""
    jobs = jobs or jobs_of_machine()
    known = [(gpu, threading.Lock()) for gpu in (gpus_here() if gpus is None else gpus)]
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs))} if jobs > 1 else {}

    def run(cell: Cell, folder: Path, started: Callable[[str], None], is_cancelled: Callable[[], bool]) -> Outcome:
        if cell.needs_gpu and not any(fits(gpu, cell) for gpu, _ in known):
            have = ", ".join(gpu.architecture for gpu, _ in known) or "none"
            wanted = f"a GPU of {cell.gpu}" if cell.gpu else "a GPU"
            reason = f"no node with {wanted}: the GPUs of this machine are {have}; run it with --address on a cluster"
            return Outcome(status="not run", reason=reason)
        with free_gpu(known, cell, is_cancelled) as gpu:
            environment = threads | ({"CUDA_VISIBLE_DEVICES": gpu.identifier} if gpu else {})
            started(platform.node())
            try:
                return work(Attempt({"cell": cell.to_dict()}, limits, environment, is_cancelled), folder)
            except Exception as error:  # an error of one cell must not stop the others
                return failed(f"{type(error).__name__}: {error}", platform.node())

    return Executor(f"this machine, {counted(jobs, 'cell')} at a time", jobs, run)


@contextlib.contextmanager
def free_gpu(
    gpus: Sequence[tuple[Gpu, threading.Lock]], cell: Cell, is_cancelled: Callable[[], bool]
) -> Iterator[Gpu | None]:
    """A GPU for a cell that needs one, as soon as one is free; None after the end of the sweep."""
    while cell.needs_gpu and not is_cancelled():
        for gpu, in_use in gpus:
            if fits(gpu, cell) and in_use.acquire(blocking=False):
                try:
                    yield gpu
                finally:
                    in_use.release()
                return
        time.sleep(POLL_SECONDS)
    yield None


def fits(gpu: Gpu, cell: Cell) -> bool:
    return not cell.gpu or gpu.architecture == cell.gpu


def jobs_of_machine() -> int:
    """The number of cells without --jobs: one per core, but no more than fit into the free memory."""
    free = free_memory_bytes()
    return max(1, usable_cores() if free is None else min(usable_cores(), free // CELL_BYTES))


# A cell needs a node with this resource, in any amount; GPUs and CPUs limit how many cells run there.
ARCHITECTURE_SHARE = 0.001
# Pieces of an artifact that a node sends ahead.
PIECES_AHEAD = 4
# Time between two looks at the nodes while a cell waits for one.
LOOK_SECONDS = 1.0
# Cells that Ray has at a time; it places them as the CPUs and GPUs of the nodes allow.
CELLS_AT_RAY = 1024
PREFIX = "effexport-sweep-"
# Resources whose amount matters, by Ray's names.
COUNTED = ("CPU", "GPU")


def attempt_of_task(attempt: Attempt, work: Work) -> Iterator[Any]:
    """Run on a node: yield its name, then the outcome, then the pieces of the artifact."""
    yield platform.node()
    for left in abandoned(Path(tempfile.gettempdir()), PREFIX):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        outcome = work(attempt, Path(folder))
        yield asdict(outcome)
        if outcome.status == "finished":
            yield from pieces_of_folder(Path(folder) / ARTIFACT)


class RayTasks:
    """Runs cells as tasks of Ray. wait_seconds: how long a cell waits for a suitable node. cpus: per cell."""

    def __init__(self, ray: Any, limits: CellLimits, *, cpus: float, wait_seconds: float, work: Work) -> None:
        self._ray, self._limits, self._cpus, self._wait_seconds = ray, limits, cpus, wait_seconds
        self._work = ray.put(work)
        # a lost cell is started again by the sweep, which counts its attempts
        options = {"max_retries": 0, "num_returns": "streaming", "_generator_backpressure_num_objects": PIECES_AHEAD}
        self._task = ray.remote(**options)(attempt_of_task)
        self._looking, self._looked = threading.Lock(), -math.inf
        self._resources: list[Mapping[str, float]] = []

    def demands(self, cell: Cell) -> dict[str, float]:
        """The resources that a node must have, by Ray's names."""
        demands = {"CPU": self._cpus, "GPU": float(cell.needs_gpu), cell.gpu: ARCHITECTURE_SHARE * cell.needs_gpu}
        return {name: amount for name, amount in demands.items() if name and amount}

    def __call__(
        self, cell: Cell, folder: Path, started: Callable[[str], None], is_cancelled: Callable[[], bool]
    ) -> Outcome:
        errors, demands = self._ray.exceptions, self.demands(cell)
        amounts = {"num_cpus": demands.pop("CPU"), "num_gpus": demands.pop("GPU", 0), "resources": demands}
        task = self._task.options(name=cell.id, **amounts)
        stream = task.remote(Attempt({"cell": cell.to_dict()}, self._limits), self._work)
        outcome: Outcome | None = None
        try:
            if reason := self._why_not_started(stream, cell, is_cancelled):
                self._ray.cancel(stream)
                return Outcome(status="not run", reason=reason)
            while not is_cancelled():
                message = self._ray.get(next(stream))
                if isinstance(message, str):
                    started(message)
                elif isinstance(message, FilePiece) and outcome is not None:
                    add_piece(folder / ARTIFACT, message, outcome.files)
                else:
                    outcome = msgspec.convert(message, Outcome)
                while not is_cancelled() and not self._ray.wait([stream], timeout=LOOK_SECONDS)[0]:
                    pass
            self._ray.cancel(stream)
            return failed("the sweep has ended")
        except StopIteration:
            return outcome or failed("its task ended without an outcome")
        except errors.RayTaskError as error:
            # raised by our code on the node, or before the node reached it
            return failed(f"on its node: {short(error)}")
        except errors.OutOfMemoryError as error:
            return failed(f"its node ran out of memory: {short(error)}")
        except errors.RayError as error:
            return Outcome(status="lost", reason=short(error))
        except (EffexportError, OSError, msgspec.ValidationError) as error:
            self._ray.cancel(stream)
            return failed(str(error))

    def _why_not_started(self, stream: Any, cell: Cell, is_cancelled: Callable[[], bool]) -> str:
        """Wait until a task starts; the reason if no node could run it for too long, and "" otherwise.

        The task was submitted anyway, so that an autoscaling cluster can add a node.
        """
        demands, last_fit = self.demands(cell), time.monotonic()
        while not is_cancelled() and not self._ray.wait([stream], timeout=LOOK_SECONDS)[0]:
            nodes = self._nodes()
            if any(all(node.get(name, 0.0) >= amount for name, amount in demands.items()) for node in nodes):
                last_fit = time.monotonic()
            elif time.monotonic() - last_fit >= self._wait_seconds:
                waited = f" within {self._wait_seconds:g} s" if self._wait_seconds else ""
                return f"no node with {demanded(demands)}{waited}; the nodes have: {offered(nodes)}"
        return ""

    def _nodes(self) -> list[Mapping[str, float]]:
        """The resources of each node, asked for once a second for all cells that wait."""
        with self._looking:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self._looked = time.monotonic()
                self._resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            return self._resources


def demanded(demands: Mapping[str, float]) -> str:
    """`1 CPU, 1 GPU and the resource sm_90`."""
    words = [f"{demands[name]:g} {name}" for name in demands if name in COUNTED]
    words += [f"the resource {name}" for name in demands if name not in COUNTED]
    return listed(words)


def offered(nodes: Sequence[Mapping[str, float]]) -> str:
    """The resources of the nodes, grouped."""
    texts = []
    for node in nodes:
        names = [name for name in node if name in COUNTED or name.startswith("sm_")]
        texts.append(" ".join(f"{node[name]:g} {name}" for name in sorted(names)) or "nothing")
    return "; ".join(f"{texts.count(text)} × {text}" for text in dict.fromkeys(texts)) or "there are no nodes"


def short(error: BaseException) -> str:
    """One line for an error of Ray, whose message may be a whole traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    return ": ".join(filter(None, (type(error).__name__, first_line(str(error), ""))))


PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class FilePiece:
    """The next bytes of a file. Files are sent one after the other, each from its start."""

    name: str
    data: bytes


def pieces_of_folder(folder: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[FilePiece]:
    """Every file, in pieces of at most `piece_bytes`. An empty file is one empty piece."""
    for name, path in files_of_folder(folder).items():
        with path.open("rb") as stream:
            yield FilePiece(name, stream.read(piece_bytes))
            while data := stream.read(piece_bytes):
                yield FilePiece(name, data)


def add_piece(folder: Path, piece: FilePiece, expected: Mapping[str, int]) -> None:
    """Append a piece to its file in an artifact. expected: the announced size in bytes by name.

    A node is trusted to compute, but not to choose where its files go. What is missing is found when the artifact is
    published. Raises EffexportError for a file that was not announced, lies outside, or is longer than announced.
    """
    path = PurePosixPath(piece.name)
    if path.is_absolute() or ".." in path.parts or piece.name not in expected:
        raise EffexportError(f"a node sent the file {piece.name!r}, which is not part of the artifact it announced")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as stream:
        size = stream.tell() + len(piece.data)
        if size > expected[piece.name]:
            raise EffexportError(f"a node sent {size} bytes of {piece.name}; it announced {expected[piece.name]}")
        stream.write(piece.data)


LOCAL_STORE_BYTES = 512 * 2**20
CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """Raises MissingExtraError without Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray", "sweep", remark="a sweep without --address does not need it") from error
    return ray


def started_ray(problem: str, remedy: str, **options: Any) -> Any:
    """Raises MissingExtraError without Ray, and UserError, with the problem and its remedy, if it does not start."""
    ray = import_ray()
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # Ray raises anything, also Exception itself
        raise UserError(f"{problem}: {short(error)}; {remedy}") from error
    return ray


def local_executor(limits: CellLimits, *, jobs: int | None, work: Work = run_attempt) -> Executor:
    """Start Ray on this machine; it ends with this process. Raises MissingExtraError and UserError."""
    jobs, gpus = jobs or jobs_of_machine(), gpus_here()
    architectures = [gpu.architecture for gpu in gpus]
    ray = started_ray(
        "Ray does not start on this machine",
        "add --processes to run without Ray",
        address="local",
        num_cpus=jobs,
        num_gpus=len(gpus),
        resources={name: float(architectures.count(name)) for name in architectures},
        include_dashboard=False,
        configure_logging=True,
        object_store_memory=LOCAL_STORE_BYTES,
    )
    run = RayTasks(ray, limits, cpus=1, wait_seconds=0, work=work)
    return Executor(f"this machine with Ray, {jobs} at a time", CELLS_AT_RAY, run, ray.shutdown)


EXPECTED_ADDRESS = "expected host:port of its head, as ray start printed it, or auto on one of its nodes"


def check_reachable(address: str) -> None:
    """Raises UserError if nothing listens at host:port; Ray itself would try for minutes. Ignores other addresses."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster at --address {address}: {error}; {EXPECTED_ADDRESS}") from error


def cluster_executor(
    address: str, limits: CellLimits, *, cpus: float, wait_seconds: float, work: Work = run_attempt
) -> Executor:
    """Connect to the cluster at `address`. Raises MissingExtraError, and UserError if it cannot be used."""
    import_ray()
    if address.startswith("ray://"):
        raise UserError(
            f"--address is {address}; Ray's client cannot send artifacts back. Run effexport on a node of the cluster, "
            "with --address auto"
        )
    check_reachable(address)
    ray = started_ray(f"no Ray cluster at --address {address}", EXPECTED_ADDRESS, address=address)
    nodes = sum(node["Alive"] for node in ray.nodes())
    title = f"the cluster at {address}, {counted(nodes, 'node')}"
    run = RayTasks(ray, limits, cpus=cpus, wait_seconds=wait_seconds, work=work)
    return Executor(title, CELLS_AT_RAY, run, ray.shutdown)
