"""Executors of a sweep: cells as processes of this machine, or as Ray tasks on a cluster or on this machine.

Ray places every cell and reports lost nodes; it never retries by itself, so that every attempt is counted. Artifacts
come back in pieces through Ray's object store, so the nodes need no shared disk.
"""

from __future__ import annotations

import math
import os
import platform
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from effexport.artifact import files_of_folder
from effexport.base.environment import free_memory_bytes, usable_cores
from effexport.base.errors import EffexportError, MissingExtraError, UserError
from effexport.base.files import abandoned
from effexport.base.formatting import counted, listed
from effexport.bench.cells import ARTIFACT, Cell, Outcome, failed
from effexport.bench.children import POLL_SECONDS, Attempt, CellLimits, Work, run_attempt
from effexport.plugins.building.toolchain import Gpu, gpus_here


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a cell: it started on the node `where`, or its attempt ended with an outcome.

    folder: the one given to `submit`. After the end, nothing more is written to it, and it has the artifact of a
    finished cell.
    """

    cell: Cell
    folder: Path
    where: str = ""
    outcome: Outcome | None = None


# (cell, folder for its log and its artifact, to be called with the node when it starts, true once it is not wanted
# any more) → its outcome
Run = Callable[[Cell, Path, Callable[[str], None], Callable[[], bool]], Outcome]


@dataclass
class Executor:
    """A pool of threads, each of which waits for one cell. title: where they run, in words. jobs: cells at a time.

    run: one attempt at a cell. on_close: called after the last one.
    """

    title: str
    jobs: int
    run: Run
    on_close: Callable[[], object] = lambda: None
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="sweep")

    def submit(self, cell: Cell, folder: Path) -> None:
        """Start or queue an attempt; its artifact goes into `folder`, which is empty."""
        self._pool.submit(self._attempt, cell, folder)

    def _attempt(self, cell: Cell, folder: Path) -> None:
        def started(where: str) -> None:
            self._events.put(Event(cell=cell, folder=folder, where=where))

        if self._closed.is_set():
            return
        try:
            outcome = self.run(cell, folder, started, self._closed.is_set)
        except Exception as error:  # an error of one cell must not stop the others
            outcome = failed(f"{type(error).__name__}: {error}", platform.node())
        self._events.put(Event(cell=cell, folder=folder, outcome=outcome))

    def wait(self, seconds: float) -> Sequence[Event]:
        """The next event; waits up to `seconds` for it."""
        try:
            return [self._events.get(timeout=seconds)]
        except queue.Empty:
            return []

    def close(self) -> None:
        """End everything that still runs."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.on_close()


# Memory for building the default encoder, with room to spare.
CELL_BYTES = 2 * 2**30


class Processes:
    """Runs cells on this machine, each in a process of its own. jobs: how many share the cores. A GPU runs one cell."""

    def __init__(self, limits: CellLimits, jobs: int, work: Work, gpus: Sequence[Gpu]) -> None:
        self._limits, self._jobs, self._work = limits, jobs, work
        self._gpus = [(gpu, threading.Lock()) for gpu in gpus]

    def __call__(
        self, cell: Cell, folder: Path, started: Callable[[str], None], is_cancelled: Callable[[], bool]
    ) -> Outcome:
        if cell.needs_gpu and not any(fits(gpu, cell) for gpu, _ in self._gpus):
            have = ", ".join(gpu.architecture for gpu, _ in self._gpus) or "none"
            wanted = f"a GPU of {cell.gpu}" if cell.gpu else "a GPU"
            reason = f"no node with {wanted}: the GPUs of this machine are {have}; run it with --address on a cluster"
            return Outcome(status="not run", reason=reason)
        with self._gpu(cell, is_cancelled) as gpu:
            # cells at the same time share the cores
            environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self._jobs))} if self._jobs > 1 else {}
            environment |= {"CUDA_VISIBLE_DEVICES": gpu.identifier} if gpu else {}
            started(platform.node())
            return self._work(Attempt({"cell": cell.to_dict()}, self._limits, environment, is_cancelled), folder)

    @contextmanager
    def _gpu(self, cell: Cell, is_cancelled: Callable[[], bool]) -> Iterator[Gpu | None]:
        """A GPU for a cell that needs one, as soon as one is free; None after the end of the sweep."""
        while cell.needs_gpu and not is_cancelled():
            for gpu, in_use in self._gpus:
                if fits(gpu, cell) and in_use.acquire(blocking=False):
                    try:
                        yield gpu
                    finally:
                        in_use.release()
                    return
            time.sleep(POLL_SECONDS)
        yield None


def process_executor(
    limits: CellLimits, jobs: int, work: Work = run_attempt, gpus: Sequence[Gpu] | None = None
) -> Executor:
    run = Processes(limits, jobs, work, gpus_here() if gpus is None else gpus)
    return Executor(f"this machine, {counted(jobs, 'cell')} at a time", jobs, run)


def fits(gpu: Gpu, cell: Cell) -> bool:
    return not cell.gpu or gpu.architecture == cell.gpu


def jobs_of_machine() -> int:
    """One cell per core, but no more than fit into the free memory."""
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
            data = stream.read(piece_bytes)
            yield FilePiece(name, data)
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


def local_executor(limits: CellLimits, *, jobs: int, work: Work = run_attempt) -> Executor:
    """Start Ray on this machine; it ends with this process. Raises MissingExtraError and UserError."""
    gpus = gpus_here()
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
