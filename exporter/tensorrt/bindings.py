"""TensorRT's Python bindings: their import, and their messages while a model is parsed and an engine is built.

`typings/tensorrt.pyi` declares the part of them that is used. TensorRT reports a failure in C++ terms, over several
lines, one of which matters: `explain` finds that line and says what went wrong and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from effexport.base.errors import MissingExtraError, UserError
from effexport.base.machine import without_garbage_collection
from effexport.base.runtimes import ENGINE_RUNTIMES, version_tuple
from effexport.base.termination import SIGNALS, terminate

if TYPE_CHECKING:
    from tensorrt import Api, Runtime


def import_api(target: str) -> Api:
    """The bindings of a target.

    Raises MissingExtraError if they are not installed, and UserError if they are too old or do not load.
    """
    row = ENGINE_RUNTIMES[target]
    try:
        module = cast("Api", importlib.import_module(row.package.module))
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == row.package.module:
            raise MissingExtraError(row.label, row.package.extra, remark=row.missing) from error
        raise UserError(f"{row.label} is installed but does not load: {error}") from error
    check_version(target, module.__version__)
    return module


def check_version(target: str, version: str) -> None:
    """Raises UserError for a release older than the oldest that has this API."""
    row = ENGINE_RUNTIMES[target]
    if version_tuple(version) < row.package.oldest:
        raise UserError(
            f"{row.label} {version} is installed; expected {'.'.join(map(str, row.package.oldest))} or later: "
            f"pip install --upgrade 'effexport[{row.package.extra}]'"
        )


T = TypeVar("T")

# How the builder's message with all kernels begins.
LISTING = "Layers:\n"
NO_REASON = "it gave no reason"
# Logged for every graph with int64 inputs, which all of ours have.
_NOISE = ("Make sure input", "Make sure output", "already exists, the output tensors")


class BuildLog:
    """The log of one build, or of one loaded engine, by severity. TensorRT takes `logger`.

    A message goes to the logs that its thread has opened or restarted; from a thread that has none, to all.
    kernels: the messages that list the kernels of an engine, see `kernels_from_log`.
    """

    def __init__(self, api: Api) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.kernels: list[str] = []
        self.restart()
        with _lock:
            self.logger = logger_of_process(api.ILogger)
            _open_logs.add(self)

    def restart(self) -> None:
        """Empty the log, for what this thread does next."""
        self.thread = _current.thread
        for messages in (self.errors, self.warnings, self.kernels):
            messages.clear()

    @property
    def said(self) -> str:
        """The first error."""
        return plain(self.errors[0]) if self.errors else NO_REASON

    def made(self, make: Callable[[Any], T]) -> T:
        """An object of TensorRT's, `make(logger)`.

        TensorRT holds a lock while it makes one, and may warn meanwhile that the process has another logger. Python
        must not collect garbage in there: the destructors of TensorRT's objects wait for the same lock, for ever.
        """
        with without_garbage_collection():
            return make(self.logger)


def make_runtime(api: Api, log: BuildLog, trusted: bool) -> Runtime:
    """A runtime, which loads engines. trusted: whether they may contain host code, as version-compatible engines do,
    which have a lean runtime of their release."""
    runtime = log.made(api.Runtime)
    if trusted:
        runtime.engine_host_code_allowed = True
    return runtime


class _Current(threading.local):
    """thread: an object for each thread; numbers of threads are used again."""

    def __init__(self) -> None:
        self.thread = object()


_current = _Current()
# Reentrant, because TensorRT may log in a thread that holds it, when Python collects garbage there.
_lock = threading.RLock()
_open_logs: weakref.WeakSet[BuildLog] = weakref.WeakSet()


def listeners() -> list[BuildLog]:
    """The logs that a message of this thread goes to."""
    with _lock:
        logs = list(_open_logs)
    return [log for log in logs if log.thread is _current.thread] or logs


@functools.cache
def logger_of_process(base: Any) -> Any:
    """The one instance of an ILogger that collects messages: TensorRT wants one per process. Called with the lock."""
    fatal = (base.INTERNAL_ERROR, base.ERROR)

    class Logger(base):  # type: ignore[misc]  # the bindings have no types
        def __init__(self) -> None:
            base.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            for log in listeners():
                if severity in fatal:
                    log.errors.append(message.strip())
                elif severity == base.WARNING and not any(noise in message for noise in _NOISE):
                    log.warnings.append(message.strip())
                elif message.startswith(LISTING):
                    log.kernels.append(message)

    return Logger()


# Takes the phase that the builder is in, and the share of it that is done.
OnProgress = Callable[[str, float], None]


def make_monitor(api: Api, on_progress: OnProgress) -> Any:
    """An IProgressMonitor that reports the outermost phases and their parts, and lets Ctrl-C through.

    An exception cannot cross the library. An interrupt is therefore stored in `interrupted`, and the next
    `step_complete` cancels the build.
    """
    base: Any = api.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]  # the bindings have no types
        def __init__(self) -> None:
            base.__init__(self)
            self.interrupted = False
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase in (None, next(iter(self._steps), None)):
                self._steps[phase_name] = num_steps
                self._report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                self._report(phase_name, step + 1)
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

        def _report(self, phase: str, done: int) -> None:
            try:
                on_progress(phase, min(1.0, done / max(1, self._steps[phase])))
            except KeyboardInterrupt:
                self.interrupted = True

    return Monitor()


@contextlib.contextmanager
def interrupting(monitor: Any) -> Iterator[None]:
    """Let Ctrl-C and the signals of `termination` cancel a build in the block, which has this monitor:
    KeyboardInterrupt or Terminated, whatever the block raised.

    Python would raise it in the next callback, and the bindings print what a callback raises and go on.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        monitor.interrupted = True

    usual: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number, ours in ((signal.SIGINT, signal.default_int_handler), *((number, terminate) for number in SIGNALS)):
            if signal.getsignal(number) is ours:
                usual[number] = ours
                signal.signal(number, interrupt)
    try:
        yield
    finally:
        for each, handler in usual.items():
            signal.signal(each, handler)
        if received:
            usual[received[0]](received[0], None)
        if monitor.interrupted:
            raise KeyboardInterrupt


# Messages of TensorRT, their meaning and a remedy; both texts may use the groups of the expression.
_PATTERNS = (
    (
        r"no tactics to implement the operation within workspace limit|insufficient workspace|increas\w+ the workspace",
        "no implementation of some layer fits into the workspace",
        "raise the limit, workspace in [engine] of the spec file, lower the maxima of --profile, or leave it out",
    ),
    (
        r"Cannot compile operation '(?P<node>[^']+)' for Turing \(SM75\): (?P<why>[^.]+)",
        "node {node} cannot be built for SM 75: {why}",
        "leave 75 out of compute_capabilities; parts of every model stay in float32, whatever its precision",
    ),
    (
        r"Attention operation was not supported by a dedicated kernel",
        "it has no kernel for all of the operator Attention in these types and sizes",
        "use the function body or a plugin of ours, or build the model with an --opset before 23",
    ),
    (
        r"(?P<layer>\w+Layer) (?P<node>[^\s:]+): (?:[^\s:]+: )?(?P<why>[^\n]*?)\s*In \w+ at",
        "{layer} at node {node}: {why}",
        "build an artifact with effexport, or report this graph",
    ),
    (
        r"[Oo]ut of memory|OutOfMemory|cudaErrorMemoryAllocation",
        "the GPU ran out of memory while building",
        "lower the maxima of --profile, set workspace in [engine] of a spec file, or free the GPU",
    ),
    (
        r"Unable to load library: (?P<library>[^:\s]+)",
        "TensorRT does not find its library {library}",
        "install it beside the bindings, or leave version_compatible out",
    ),
    (
        r"CUDA driver version is insufficient|no CUDA-capable device|cudaError 35|cudaErrorNoDevice",
        "this step needs an NVIDIA GPU with a recent driver, and this machine has none",
        "build on a machine with a GPU, or use --target trt-rtx, which needs none",
    ),
    (
        r"Dimension mismatch for tensor (?P<node>\S+) and profile",
        "the profile does not fit the shape of {node}",
        "choose other sizes with --profile",
    ),
)


def explain(errors: Sequence[str]) -> str:
    """The reason of a failed build and the remedy, found in the lines of its log."""
    for expression, reason, remedy in _PATTERNS:
        for line in errors:
            if match := re.search(expression, line):
                return f"{reason}; {remedy}".format(**match.groupdict())
    return f"TensorRT reports: {plain(errors[0])}" if errors else NO_REASON


def plain(line: str) -> str:
    """A line of the log without the places in TensorRT's own sources."""
    text = re.sub(r"\s+", " ", line)
    text = re.sub(r"\s*\(In (function )?\w+ at /[^\s)]+\)|\s*In (function )?\w+ at /[^\s)]+", "", text)
    return re.sub(r"^(\w+::\w+: )?(Error Code \d+: )?", "", text).strip()
