# The part of TensorRT's Python API that effexport uses, for TensorRT and TensorRT-RTX alike; neither has types.
#
# mypy rejects all that is not declared here, and test_tensorrt_api.py looks each class, method and constant up in the
# real bindings of both products: if a release renames one, a test fails before a user sees it.

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__version__: str

def get_plugin_registry() -> Any: ...

class IPluginCreatorV3Quick:
    # the base class of ours, in plugins/tensorrt_plugins.py
    name: str
    plugin_namespace: str
    plugin_version: str
    field_names: Any

class ILogger:
    # `bindings.logger_of_process` overrides its `log`
    INTERNAL_ERROR: Any
    ERROR: Any
    WARNING: Any
    def log(self, severity: Any, message: str) -> None: ...

class BuilderFlag:
    TF32: Any
    REFIT: Any
    VERSION_COMPATIBLE: Any
    WEIGHT_STREAMING: Any

class NetworkDefinitionCreationFlag:
    STRONGLY_TYPED: Any
    PREFER_AOT_PYTHON_PLUGINS: Any

class HardwareCompatibilityLevel:
    NONE: Any
    AMPERE_PLUS: Any
    SAME_COMPUTE_CAPABILITY: Any

class MemoryPoolType:
    WORKSPACE: Any

class ProfilingVerbosity:
    DETAILED: Any

class LayerInformationFormat:
    JSON: Any

class DataType:
    FLOAT: Any
    HALF: Any
    BF16: Any
    INT64: Any
    INT32: Any
    BOOL: Any

class TensorLocation:
    DEVICE: Any

class ExecutionContextAllocationStrategy:
    USER_MANAGED: Any

class CudaGraphStrategy:
    WHOLE_GRAPH_CAPTURE: Any

class TensorIOMode:
    INPUT: Any
    OUTPUT: Any

class ComputeCapability:
    SM75: Any
    SM80: Any
    SM86: Any
    SM89: Any
    SM120: Any
    SM121: Any

class EngineValidity:
    INVALID: Any

class EngineInvalidityDiagnostics:
    VERSION_MISMATCH: Any
    UNSUPPORTED_CC: Any
    OLD_CUDA_DRIVER: Any
    OLD_CUDA_RUNTIME: Any
    INSUFFICIENT_GPU_MEMORY: Any
    MALFORMED_ENGINE: Any
    CUDA_ERROR: Any

class IProgressMonitor:
    # `bindings.make_monitor` overrides it
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...
    def step_complete(self, phase_name: str, step: int) -> bool: ...
    def phase_finish(self, phase_name: str) -> None: ...

class IHostMemory:
    # a buffer of the library
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class ITensor:
    name: str
    dtype: Any

class ILayer:
    name: str
    type: Any
    num_outputs: int
    def get_output(self, index: int) -> ITensor: ...

class LayerType:
    ATTENTION_INPUT: Any

class IAttention:
    # whether the builder may take it apart if it has no kernel for all of it
    decomposable: bool

class IAttentionInputLayer:
    # the first layer of an attention; see `engine_from_onnx.keep_attention_whole`
    attention: IAttention

class INetworkDefinition:
    num_outputs: int
    num_layers: int
    def get_output(self, index: int) -> ITensor: ...
    def get_layer(self, index: int) -> ILayer: ...

class ParserError:
    def desc(self) -> str: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...

class OnnxParser:
    num_errors: int
    def get_error(self, index: int) -> ParserError: ...
    def parse(self, model: bytes, path: str) -> bool: ...

class IOptimizationProfile:
    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None: ...

class ITimingCache:
    def serialize(self) -> IHostMemory: ...

class IBuilderConfig:
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

class Builder:
    def create_network(self, flags: int) -> INetworkDefinition: ...
    def create_builder_config(self) -> IBuilderConfig: ...
    def create_optimization_profile(self) -> IOptimizationProfile: ...
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None: ...

class EngineInspector:
    def get_engine_information(self, format: Any) -> str: ...

class IExecutionContext:
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...
    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def infer_shapes(self) -> Sequence[str]: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...
    def set_device_memory(self, memory: int, size: int) -> None: ...

class IRuntimeConfig:
    # a CudaGraphStrategy; only TensorRT-RTX has it
    cuda_graph_strategy: Any

class ICudaEngine:
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

class Refitter:
    def get_missing_weights(self) -> Sequence[str]: ...
    def refit_cuda_engine(self) -> bool: ...

class OnnxParserRefitter:
    def refit_from_bytes(self, model: bytes, path: str) -> bool: ...

class Runtime:
    engine_host_code_allowed: bool
    engine_header_size: int
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None: ...
    def get_engine_validity(self, buffer: bytes) -> tuple[Any, int]: ...

class Api(Protocol):
    # the module itself; ILogger and IProgressMonitor are base classes of ours
    __version__: str
    ILogger: Any
    IProgressMonitor: Any
    Builder: Callable[[Any], Builder]
    OnnxParser: Callable[[INetworkDefinition, Any], OnnxParser]
    Runtime: Callable[[Any], Runtime]
    OnnxParserRefitter: Callable[[Refitter, Any], OnnxParserRefitter]
    Refitter: Callable[[ICudaEngine, Any], Refitter]
    BuilderFlag: type[BuilderFlag]
    NetworkDefinitionCreationFlag: type[NetworkDefinitionCreationFlag]
    HardwareCompatibilityLevel: type[HardwareCompatibilityLevel]
    MemoryPoolType: type[MemoryPoolType]
    ProfilingVerbosity: type[ProfilingVerbosity]
    LayerInformationFormat: type[LayerInformationFormat]
    LayerType: type[LayerType]
    IAttentionInputLayer: type
    TensorIOMode: type[TensorIOMode]
    DataType: type[DataType]
    TensorLocation: type[TensorLocation]
    ExecutionContextAllocationStrategy: type[ExecutionContextAllocationStrategy]
    CudaGraphStrategy: type[CudaGraphStrategy]
    ComputeCapability: type[ComputeCapability]
    EngineValidity: type[EngineValidity]
    EngineInvalidityDiagnostics: type[EngineInvalidityDiagnostics]
