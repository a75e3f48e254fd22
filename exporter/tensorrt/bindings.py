"""The part of TensorRT's Python API that effexport uses, for TensorRT and TensorRT-RTX alike.

The bindings have no types. These protocols declare every class, method and constant that our code uses, and mypy
rejects all others; a test looks each of them up in the real bindings of both products. If a release renames a method,
a test fails before a user sees it.

Each protocol has the name of the class it describes; those of enumerations end in `Values`. NOT_IN_RTX and NOT_IN_TRT
list what only the other product has.
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
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

from effexport.environment import without_garbage_collection
from effexport.errors import MissingExtraError, UserError
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.termination import SIGNALS, terminate


class ILogger(Protocol):
    """Severities; `builder_log.logger_of_process` overrides its `log`."""

    INTERNAL_ERROR: Any
    ERROR: Any
    WARNING: Any

    def log(self, severity: Any, message: str) -> None: ...


class BuilderFlagValues(Protocol):
    TF32: Any
    REFIT: Any
    VERSION_COMPATIBLE: Any
    WEIGHT_STREAMING: Any


class NetworkDefinitionCreationFlagValues(Protocol):
    STRONGLY_TYPED: Any
    PREFER_AOT_PYTHON_PLUGINS: Any


class HardwareCompatibilityLevelValues(Protocol):
    NONE: Any
    AMPERE_PLUS: Any
    SAME_COMPUTE_CAPABILITY: Any


class MemoryPoolTypeValues(Protocol):
    WORKSPACE: Any


class ProfilingVerbosityValues(Protocol):
    DETAILED: Any


class LayerInformationFormatValues(Protocol):
    JSON: Any


class DataTypeValues(Protocol):
    FLOAT: Any
    HALF: Any
    BF16: Any
    INT64: Any
    INT32: Any
    BOOL: Any


class TensorLocationValues(Protocol):
    DEVICE: Any


class ExecutionContextAllocationStrategyValues(Protocol):
    USER_MANAGED: Any


class CudaGraphStrategyValues(Protocol):
    WHOLE_GRAPH_CAPTURE: Any


class TensorIOModeValues(Protocol):
    INPUT: Any
    OUTPUT: Any


class ComputeCapabilityValues(Protocol):
    SM75: Any
    SM80: Any
    SM86: Any
    SM89: Any
    SM120: Any
    SM121: Any


class EngineValidityValues(Protocol):
    INVALID: Any


class EngineInvalidityDiagnosticsValues(Protocol):
    VERSION_MISMATCH: Any
    UNSUPPORTED_CC: Any
    OLD_CUDA_DRIVER: Any
    OLD_CUDA_RUNTIME: Any
    INSUFFICIENT_GPU_MEMORY: Any
    MALFORMED_ENGINE: Any
    CUDA_ERROR: Any


class IProgressMonitor(Protocol):
    """What `builder_log.make_monitor` overrides."""

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...

    def step_complete(self, phase_name: str, step: int) -> bool: ...

    def phase_finish(self, phase_name: str) -> None: ...


class IHostMemory(Protocol):
    """A buffer of the library; see `bytes_of`."""

    nbytes: int


class ITensor(Protocol):
    name: str
    dtype: Any


class ILayer(Protocol):
    name: str
    type: Any
    num_outputs: int

    def get_output(self, index: int) -> ITensor: ...


class LayerTypeValues(Protocol):
    ATTENTION_INPUT: Any


class IAttention(Protocol):
    """decomposable: whether the builder may take it apart if it has no kernel for all of it."""

    decomposable: bool


class IAttentionInputLayer(Protocol):
    """The first layer of an attention; see `network.keep_attention_whole`."""

    attention: IAttention


class INetworkDefinition(Protocol):
    num_outputs: int
    num_layers: int

    def get_output(self, index: int) -> ITensor: ...

    def get_layer(self, index: int) -> ILayer: ...


class ParserError(Protocol):
    def desc(self) -> str: ...

    def node_name(self) -> str: ...

    def node_operator(self) -> str: ...


class OnnxParser(Protocol):
    num_errors: int

    def get_error(self, index: int) -> ParserError: ...

    def parse(self, model: bytes, path: str) -> bool: ...


class IOptimizationProfile(Protocol):
    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None: ...


class ITimingCache(Protocol):
    def serialize(self) -> IHostMemory: ...


class IBuilderConfig(Protocol):
    builder_optimization_level: int
    profiling_verbosity: Any
    progress_monitor: Any
    hardware_compatibility_level: Any
    num_compute_capabilities: int

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int: ...

    def set_flag(self, flag: Any) -> None: ...

    def clear_flag(self, flag: Any) -> None: ...

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None: ...

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None: ...

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool: ...

    def get_timing_cache(self) -> ITimingCache: ...

    def set_compute_capability(self, compute_capability: Any, index: int) -> bool: ...


class Builder(Protocol):
    def create_network(self, flags: int) -> INetworkDefinition: ...

    def create_builder_config(self) -> IBuilderConfig: ...

    def create_optimization_profile(self) -> IOptimizationProfile: ...

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None: ...


class EngineInspector(Protocol):
    def get_engine_information(self, format: Any) -> str: ...


class IExecutionContext(Protocol):
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def infer_shapes(self) -> Sequence[str]: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...

    def set_device_memory(self, memory: int, size: int) -> None: ...


class IRuntimeConfig(Protocol):
    """cuda_graph_strategy: see CudaGraphStrategyValues; only TensorRT-RTX has it."""

    cuda_graph_strategy: Any


class ICudaEngine(Protocol):
    weight_streaming_budget_v2: int
    num_io_tensors: int
    num_optimization_profiles: int
    num_layers: int
    device_memory_size_v2: int
    streamable_weights_size: int

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> Any: ...

    def get_tensor_dtype(self, name: str) -> Any: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_location(self, name: str) -> Any: ...

    def create_runtime_config(self) -> IRuntimeConfig: ...

    def create_execution_context(self, strategy_or_config: Any = ..., /) -> IExecutionContext | None: ...

    def create_engine_inspector(self) -> EngineInspector: ...

    def serialize(self) -> IHostMemory: ...


class Refitter(Protocol):
    def get_missing_weights(self) -> Sequence[str]: ...

    def refit_cuda_engine(self) -> bool: ...


class OnnxParserRefitter(Protocol):
    def refit_from_bytes(self, model: bytes, path: str) -> bool: ...


class Runtime(Protocol):
    engine_host_code_allowed: bool
    engine_header_size: int

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None: ...

    def get_engine_validity(self, buffer: bytes) -> tuple[Any, int]: ...


class Api(Protocol):
    """The module itself. ILogger and IProgressMonitor are base classes of ours, in builder_log.py."""

    __version__: str
    ILogger: Any
    IProgressMonitor: Any
    Builder: Callable[[Any], Builder]
    OnnxParser: Callable[[INetworkDefinition, Any], OnnxParser]
    Runtime: Callable[[Any], Runtime]
    OnnxParserRefitter: Callable[[Refitter, Any], OnnxParserRefitter]
    Refitter: Callable[[ICudaEngine, Any], Refitter]
    BuilderFlag: BuilderFlagValues
    NetworkDefinitionCreationFlag: NetworkDefinitionCreationFlagValues
    HardwareCompatibilityLevel: HardwareCompatibilityLevelValues
    MemoryPoolType: MemoryPoolTypeValues
    ProfilingVerbosity: ProfilingVerbosityValues
    LayerInformationFormat: LayerInformationFormatValues
    LayerType: LayerTypeValues
    IAttentionInputLayer: type
    TensorIOMode: TensorIOModeValues
    DataType: DataTypeValues
    TensorLocation: TensorLocationValues
    ExecutionContextAllocationStrategy: ExecutionContextAllocationStrategyValues
    CudaGraphStrategy: CudaGraphStrategyValues
    ComputeCapability: ComputeCapabilityValues
    EngineValidity: EngineValidityValues
    EngineInvalidityDiagnostics: EngineInvalidityDiagnosticsValues


# What only the other product has, as "Class" or "Class.member".
NOT_IN_TRT = frozenset(
    {
        "ComputeCapability",
        "EngineValidity",
        "EngineInvalidityDiagnostics",
        "IBuilderConfig.num_compute_capabilities",
        "IBuilderConfig.set_compute_capability",
        "CudaGraphStrategy",
        "IRuntimeConfig.cuda_graph_strategy",
        "Runtime.engine_header_size",
        "Runtime.get_engine_validity",
    }
)
NOT_IN_RTX = frozenset({"NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS"})


def import_api(target: str) -> Api:
    """The bindings of a target.

    Raises MissingExtraError if they are not installed, and UserError if they are too old or do not load.
    """
    package, title = ENGINE_RUNTIMES[target].package, ENGINE_RUNTIMES[target].label
    try:
        module = cast(Api, importlib.import_module(package.module))
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package.module:
            raise MissingExtraError(title, package.extra, remark=missing_remark(target)) from error
        raise UserError(f"{title} is installed but does not load: {error}") from error
    check_version(target, module.__version__)
    return module


def missing_remark(target: str) -> str:
    if target == "trt":
        return "it needs an NVIDIA GPU; --target trt-rtx builds without one"
    return "it needs no GPU to build engines, only to run them"


def check_version(target: str, version: str) -> None:
    """Raises UserError for a release older than the oldest that has this API."""
    package = ENGINE_RUNTIMES[target].package
    if version_tuple(version) < package.oldest:
        raise UserError(
            f"{ENGINE_RUNTIMES[target].label} {version} is installed; expected "
            f"{'.'.join(map(str, package.oldest))} or later: pip install --upgrade 'effexport[{package.extra}]'"
        )


def version_tuple(version: str) -> tuple[int, int]:
    """Major and minor number."""
    major, minor, *_ = [*version.split("."), "0"]
    return int(major), int(minor)


def bytes_of(memory: IHostMemory) -> bytes:
    """A copy of a buffer of the library."""
    return bytes(cast(Any, memory))


T = TypeVar("T")

# How the builder's message with all kernels begins.
LISTING = "Layers:\n"
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
        self.logger = logger_of_process(api.ILogger)
        self.restart()
        with _lock:
            _open_logs.add(self)

    def restart(self) -> None:
        """Empty the log, for what this thread does next."""
        self.thread = _current.thread
        for messages in (self.errors, self.warnings, self.kernels):
            messages.clear()

    def made(self, make: Callable[[Any], T]) -> T:
        """An object of TensorRT's, `make(logger)`.

        TensorRT holds a lock while it makes one, and may warn meanwhile that the process has another logger. Python
        must not collect garbage in there: the destructors of TensorRT's objects wait for the same lock, for ever.
        """
        with without_garbage_collection():
            return make(self.logger)


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


def logger_of_process(base: Any) -> Any:
    """The one instance of an ILogger that collects messages: TensorRT wants one logger per process."""
    with _lock:
        return _new_logger(base)


@functools.cache
def _new_logger(base: Any) -> Any:
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
    """An IProgressMonitor that reports the outermost phases, and lets Ctrl-C through.

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
            if parent_phase is None or parent_phase in self._outermost():
                self._steps[phase_name] = num_steps
                self._report(phase_name, 0.0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                self._report(phase_name, (step + 1) / max(1, self._steps[phase_name]))
            return not self.interrupted

        def interrupt(self) -> None:
            self.interrupted = True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

        def _outermost(self) -> list[str]:
            return list(self._steps)[:1]

        def _report(self, phase: str, share: float) -> None:
            try:
                on_progress(phase, min(1.0, share))
            except KeyboardInterrupt:
                self.interrupt()

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
        monitor.interrupt()

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


@dataclass(frozen=True)
class _Pattern:
    """A message of TensorRT, its meaning and a remedy; both texts may use the groups of the expression."""

    expression: str
    reason: str
    remedy: str


_PATTERNS = (
    _Pattern(
        r"no tactics to implement the operation within workspace limit|insufficient workspace|increas\w+ the workspace",
        "no implementation of some layer fits into the workspace",
        "raise the limit with --workspace, lower the maxima of --profile, or leave --workspace out",
    ),
    _Pattern(
        r"Cannot compile operation '(?P<node>[^']+)' for Turing \(SM75\): (?P<why>[^.]+)",
        "node {node} cannot be built for SM 75: {why}",
        "leave 75 out of --compute-capabilities; parts of every model stay in float32, whatever its precision",
    ),
    _Pattern(
        r"Attention operation was not supported by a dedicated kernel",
        "it has no kernel for all of the operator Attention in these types and sizes",
        "use the function body or a plugin of ours, or build the model with an --opset before 23",
    ),
    _Pattern(
        r"(?P<layer>\w+Layer) (?P<node>[^\s:]+): (?:[^\s:]+: )?(?P<why>[^\n]*?)\s*In \w+ at",
        "{layer} at node {node}: {why}",
        "build an artifact with effexport, or report this graph",
    ),
    _Pattern(
        r"[Oo]ut of memory|OutOfMemory|cudaErrorMemoryAllocation",
        "the GPU ran out of memory while building",
        "lower the maxima of --profile, set --workspace, or free the GPU",
    ),
    _Pattern(
        r"Unable to load library: (?P<library>[^:\s]+)",
        "TensorRT does not find its library {library}",
        "install it beside the bindings, or leave --version-compatible out",
    ),
    _Pattern(
        r"CUDA driver version is insufficient|no CUDA-capable device|cudaError 35|cudaErrorNoDevice",
        "this step needs an NVIDIA GPU with a recent driver, and this machine has none",
        "build on a machine with a GPU, or use --target trt-rtx, which needs none",
    ),
    _Pattern(
        r"Dimension mismatch for tensor (?P<node>\S+) and profile",
        "the profile does not fit the shape of {node}",
        "choose other sizes with --profile",
    ),
)


def explain(errors: Sequence[str]) -> str:
    """The reason of a failed build and the remedy, found in the lines of its log."""
    for pattern in _PATTERNS:
        for line in errors:
            if match := re.search(pattern.expression, line):
                groups = match.groupdict()
                return f"{pattern.reason.format(**groups)}; {pattern.remedy.format(**groups)}"
    if not errors:
        return "it gave no reason"
    return f"TensorRT reports: {plain(errors[0])}"


def plain(line: str) -> str:
    """A line of the log without the places in TensorRT's own sources."""
    text = re.sub(r"\s+", " ", line)
    text = re.sub(r"\s*\(In (function )?\w+ at /[^\s)]+\)", "", text)
    text = re.sub(r"\s*In (function )?\w+ at /[^\s)]+", "", text)
    text = re.sub(r"^\w+::\w+: ", "", text)
    text = re.sub(r"^Error Code \d+: ", "", text)
    return text.strip()
