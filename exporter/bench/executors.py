"""Executors of a sweep: cells as processes of this machine, or as Ray tasks on a cluster or on this machine.

Ray places every cell and reports lost nodes; it never retries by itself, so that every attempt is counted. Artifacts
come back in pieces through Ray's object store, so the nodes need no shared disk.
"""

from __future__ import annotations

import os
import platform
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

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


class Executor(Protocol):
    """Something that runs cells. title: its name in words."""

    @property
    def title(self) -> str: ...

    def submit(self, cell: Cell, folder: Path) -> None:
        """Start or queue an attempt; its artifact goes into `folder`, which is empty."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """The events since the last call; waits up to `seconds` for the first one."""
        ...

    def close(self) -> None:
        """End everything that still runs."""
        ...


# Memory for building the default encoder, with room to spare.
CELL_BYTES = 2 * 2**30


@dataclass
class ProcessExecutor:
    """An executor on this machine. jobs: cells at a time. work: runs an attempt. A GPU runs one cell."""

    limits: CellLimits
    jobs: int = 1
    work: Work = run_attempt
    gpus: tuple[Gpu, ...] = field(default_factory=gpus_here)
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="sweep")
        self._gpus = [(gpu, threading.Lock()) for gpu in self.gpus]

    @property
    def title(self) -> str:
        return f"this machine, {counted(self.jobs, 'cell')} at a time"

    def submit(self, cell: Cell, folder: Path) -> None:
        if cell.needs_gpu and not any(fits(gpu, cell) for gpu in self.gpus):
            have = ", ".join(gpu.architecture for gpu in self.gpus) or "none"
            wanted = f"a GPU of {cell.gpu}" if cell.gpu else "a GPU"
            reason = f"no node with {wanted}: the GPUs of this machine are {have}; run it with --address on a cluster"
            self._events.put(Event(cell=cell, folder=folder, outcome=Outcome(status="not run", reason=reason)))
            return
        self._pool.submit(self._run, cell, folder)

    def _run(self, cell: Cell, folder: Path) -> None:
        with self._gpu(cell) as gpu:
            if self._closed.is_set():
                return
            # cells at the same time share the cores
            environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self.jobs))} if self.jobs > 1 else {}
            environment |= {"CUDA_VISIBLE_DEVICES": gpu.identifier} if gpu else {}
            self._events.put(Event(cell=cell, folder=folder, where=platform.node()))
            try:
                attempt = Attempt({"cell": cell.to_dict()}, self.limits, environment, self._closed.is_set)
                outcome = self.work(attempt, folder)
            except Exception as error:  # an error of one cell must not stop the others
                outcome = failed(f"{type(error).__name__}: {error}", platform.node())
            self._events.put(Event(cell=cell, folder=folder, outcome=outcome))

    @contextmanager
    def _gpu(self, cell: Cell) -> Iterator[Gpu | None]:
        """A GPU for a cell that needs one, as soon as one is free; None after the end of the sweep."""
        while cell.needs_gpu and not self._closed.is_set():
            for gpu, in_use in self._gpus:
                if fits(gpu, cell) and in_use.acquire(blocking=False):
                    try:
                        yield gpu
                    finally:
                        in_use.release()
                    return
            self._closed.wait(POLL_SECONDS)
        yield None

    def wait(self, seconds: float) -> Sequence[Event]:
        try:
            return [self._events.get(timeout=seconds)]
        except queue.Empty:
            return []

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


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
# Time between two looks at the nodes while cells wait for one.
LOOK_SECONDS = 1.0
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


@dataclass
class Running:
    """A task in progress. unplaceable_since: when it was first seen that no node could run it."""

    cell: Cell
    stream: Any
    folder: Path
    outcome: Outcome | None = None
    is_started: bool = False
    unplaceable_since: float | None = None


class RayExecutor:
    """An executor on Ray. wait_seconds: how long a cell waits for a suitable node. cpus: per cell."""

    def __init__(
        self, ray: Any, title: str, limits: CellLimits, *, cpus: float, wait_seconds: float, work: Work = run_attempt
    ) -> None:
        self._ray, self._limits, self._cpus, self._wait_seconds = ray, limits, cpus, wait_seconds
        self._work = ray.put(work)
        # a lost cell is started again by the sweep, which counts its attempts
        options = {"max_retries": 0, "num_returns": "streaming", "_generator_backpressure_num_objects": PIECES_AHEAD}
        self._task = ray.remote(**options)(attempt_of_task)
        self._running: dict[Any, Running] = {}
        self._looked = 0.0
        self.title = title

    def demands(self, cell: Cell) -> dict[str, float]:
        """The resources that a node must have, by Ray's names."""
        demands = {"CPU": self._cpus, "GPU": float(cell.needs_gpu), cell.gpu: ARCHITECTURE_SHARE * cell.needs_gpu}
        return {name: amount for name, amount in demands.items() if name and amount}

    def submit(self, cell: Cell, folder: Path) -> None:
        demands = self.demands(cell)
        amounts = {"num_cpus": demands.pop("CPU"), "num_gpus": demands.pop("GPU", 0), "resources": demands}
        task = self._task.options(name=cell.id, **amounts)
        stream = task.remote(Attempt({"cell": cell.to_dict()}, self._limits), self._work)
        self._running[stream] = Running(cell, stream, folder)

    def wait(self, seconds: float) -> Sequence[Event]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=min(seconds, LOOK_SECONDS))
        events = [event for stream in ready for event in self._next(self._running[stream])]
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            events += self._unplaceable()
        return events

    def _next(self, task: Running) -> Iterator[Event]:
        """Take the next message of a task."""
        errors = self._ray.exceptions
        try:
            message = self._ray.get(next(task.stream))
            if isinstance(message, str):
                task.is_started = True
                yield Event(cell=task.cell, folder=task.folder, where=message)
            elif isinstance(message, FilePiece) and task.outcome is not None:
                add_piece(task.folder / ARTIFACT, message, task.outcome.files)
            else:
                task.outcome = msgspec.convert(message, Outcome)
            return
        except StopIteration:
            outcome = task.outcome or failed("its task ended without an outcome")
        except errors.RayTaskError as error:
            # raised by our code on the node, or before the node reached it
            outcome = failed(f"on its node: {short(error)}")
        except errors.OutOfMemoryError as error:
            outcome = failed(f"its node ran out of memory: {short(error)}")
        except errors.RayError as error:
            outcome = Outcome(status="lost", reason=short(error))
        except (EffexportError, OSError, msgspec.ValidationError) as error:
            self._ray.cancel(task.stream)
            outcome = failed(str(error))
        del self._running[task.stream]
        yield Event(cell=task.cell, folder=task.folder, outcome=outcome)

    def _unplaceable(self) -> Iterator[Event]:
        """Events for cells that have waited too long for a node. They were submitted anyway, so that an autoscaling
        cluster can add a node."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        now = time.monotonic()
        for task in [task for task in self._running.values() if not task.is_started]:
            demands = self.demands(task.cell)
            if any(all(node.get(name, 0.0) >= amount for name, amount in demands.items()) for node in nodes):
                task.unplaceable_since = None
                continue
            task.unplaceable_since = task.unplaceable_since or now
            if now - task.unplaceable_since >= self._wait_seconds:
                self._ray.cancel(task.stream)
                del self._running[task.stream]
                waited = f" within {self._wait_seconds:g} s" if self._wait_seconds else ""
                reason = f"no node with {demanded(demands)}{waited}; the nodes have: {offered(nodes)}"
                yield Event(cell=task.cell, folder=task.folder, outcome=Outcome(status="not run", reason=reason))

    def close(self) -> None:
        for stream in self._running:
            self._ray.cancel(stream)
        self._running.clear()
        self._ray.shutdown()


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


def local_executor(limits: CellLimits, *, jobs: int, work: Work = run_attempt) -> RayExecutor:
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
    return RayExecutor(ray, f"this machine with Ray, {jobs} at a time", limits, cpus=1, wait_seconds=0, work=work)


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
) -> RayExecutor:
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
    return RayExecutor(ray, title, limits, cpus=cpus, wait_seconds=wait_seconds, work=work)
