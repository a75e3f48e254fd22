"""The part of TensorRT's Python API that effexport uses, for TensorRT and TensorRT-RTX alike.

The bindings have no types. These protocols declare every class, method and constant that our code uses, and mypy
rejects all others; a test looks each of them up in the real bindings of both products. If a release renames a method,
a test fails before a user sees it.

Each protocol has the name of the class it describes; those of enumerations end in `Values`. NOT_IN_RTX and NOT_IN_TRT
list what only the other product has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from effexport.errors import MissingExtraError, UserError
from effexport.runtimes import ENGINE_RUNTIMES


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
