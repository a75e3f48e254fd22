"""A TensorRT and a CUDA made of Python, strict where the real ones are, for tests of the runner on any machine.

They prove our bookkeeping: which call comes when, what is waited for, what is freed. They prove nothing about
TensorRT, whose kernels, messages and speed only a GPU shows.

What the fake GPU queues is done when somebody waits for it, and not before, so a missing `synchronize` shows. Freed
memory cannot be touched; fresh memory is full of 0xA5. Misuse that the real ones punish with wrong results or a crash
is an AssertionError here.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.runners.cuda import CudaError, Memory, PinnedMemory
from effexport.tensorrt.sidecar import EngineInfo, ShapeRange, write_sidecar

POISON = 0xA5
STREAM = 77
VERSION = "11.4.0.106"

Arrays = dict[str, np.ndarray]


def written_engine(path: Path, **fields: Any) -> EngineInfo:
    """Write an engine that only FakeTensorRT loads, with its sidecar. fields: inputs, outputs, profiles, and any of the
    sidecar's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"an engine")
    usual: dict[str, Any] = {
        "target": "trt",
        "tensorrt_version": VERSION,
        "effexport_version": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "precision": "fp32",
        "options": {},
        "onnx_sha256": "a" * 64,
        "onnx_bytes": 1,
        "engine_sha256": hashlib.sha256(b"an engine").hexdigest(),
        "engine_bytes": len(b"an engine"),
        "build_seconds": 1.0,
        "compute_capabilities": (90,),
    }
    info = EngineInfo(**{**usual, **fields})
    write_sidecar(path, info)
    return info


class FakeCuda:
    """Implements Cuda. fail_at: how many more calls of a method work, before the next raises CudaError."""

    def __init__(self, compute_capability: int = 90) -> None:
        self.stream_handle = STREAM
        self.compute_capability = compute_capability
        self.device: dict[int, bytearray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.counts: dict[str, int] = {}
        self.fail_at: dict[str, int] = {}
        self.closed = False
        self.capturing: list[Callable[[], None]] | None = None
        self._queue: list[Callable[[], None]] = []
        self._running: set[int] = set()
        self._next_address = 256
        self._thread: int | None = None

    @contextmanager
    def selected(self) -> Iterator[None]:
        assert self._thread is None, "two threads use one stream, or selected is nested"
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _count(self, name: str) -> None:
        assert self._thread == threading.get_ident(), f"{name} outside selected"
        assert not self.closed, f"{name} after close"
        self.counts[name] = self.counts.get(name, 0) + 1
        if name in self.fail_at:
            if self.fail_at[name] == 0:
                raise CudaError(f"CUDA reports cudaErrorOfTheTest: {name} fails")
            self.fail_at[name] -= 1

    def memory_info(self) -> tuple[int, int]:
        self._count("memory_info")
        return 1000, 2000

    def allocate(self, nbytes: int) -> Memory:
        self._count("allocate")
        assert nbytes > 0
        assert self.capturing is None, "allocated during a capture"
        self._next_address += -(-nbytes // 256) * 256 + 256
        self.device[self._next_address] = bytearray([POISON]) * nbytes
        return Memory(self._next_address, nbytes)

    def free(self, memory: Memory) -> None:
        self._count("free")
        assert not self._queue, "freed memory that queued work may use"
        if isinstance(memory, PinnedMemory):
            self.pinned.pop(memory.address)[:] = POISON
        else:
            del self.device[memory.address]

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        self._count("allocate_pinned")
        self._next_address += 256
        array = np.full(nbytes, POISON, np.uint8)
        self.pinned[self._next_address] = array
        return PinnedMemory(self._next_address, nbytes, array=array)

    def copy(self, destination: Memory, source: Memory, nbytes: int) -> None:
        self._count("copy_to_host" if isinstance(destination, PinnedMemory) else "copy_to_device")
        assert isinstance(source, PinnedMemory) != isinstance(destination, PinnedMemory)
        assert nbytes <= min(destination.nbytes, source.nbytes)

        def work() -> None:
            # addresses are looked up now, so that freed memory shows
            there, back = ({**self.device, **self.pinned}[memory.address] for memory in (destination, source))
            memoryview(there)[:nbytes] = memoryview(back)[:nbytes]

        self.queue(work)

    def queue(self, work: Callable[[], None]) -> None:
        (self._queue if self.capturing is None else self.capturing).append(work)

    def synchronize(self) -> None:
        assert self.capturing is None, "waited during a capture"
        try:
            self._count("synchronize")
            for work in self._queue:
                work()
        finally:
            self._queue.clear()
            self._running.clear()

    def capture(self, work: Callable[[], None]) -> int:
        self._count("capture")
        assert not self._queue, "captured while work is queued"
        self.capturing = []
        try:
            work()
            captured = self.capturing
        finally:
            self.capturing = None
        handle = self.counts["capture"]
        self.graphs[handle] = captured
        return handle

    def launch(self, graph: int) -> None:
        self._count("launch")
        self._running.add(graph)
        for work in self.graphs[graph]:
            self.queue(work)

    def destroy(self, graph: int) -> None:
        self._count("destroy")
        assert graph not in self._running, "destroyed a graph that may be running"
        del self.graphs[graph]

    def close(self) -> None:
        self._count("close")
        self.closed = True

    def assert_nothing_left(self) -> None:
        left = (len(self.device), len(self.pinned), len(self.graphs))
        assert left == (0, 0, 0), f"device memory, pinned memory, graphs: {left}"
        assert self.closed


@dataclass
class FakeModel:
    """The model of an engine. output_shapes: of the outputs, by the shapes of the inputs."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    profiles: tuple[Mapping[str, ShapeRange], ...]
    function: Callable[[Arrays], Arrays]
    output_shapes: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, tuple[int, ...]]]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (*self.inputs, *self.outputs)


@dataclass
class Enumeration:
    """Members with the numbers of the real one, where those matter."""

    members: Mapping[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return self.members.get(name, f"{name} of the fake")


class FakeTensorRT:
    """The module, as `Api` declares it. Tests change it through the attributes.

    model: what every engine computes, except for those whose file is in `models`.
    refuses_to_load, enqueue_fails, capture_fails, context_fails: what goes wrong. validity: for get_engine_validity.
    refuses_weights: for an OnnxParserRefitter. missing_weights: for a Refitter.
    alive: how many engines and contexts there are.
    """

    def __init__(self, model: FakeModel, cuda: FakeCuda, version: str = VERSION) -> None:
        self.__version__ = version
        self.model, self.cuda = model, cuda
        self.models: dict[bytes, FakeModel] = {}
        self.refuses_to_load = self.enqueue_fails = self.capture_fails = self.context_fails = False
        self.refuses_weights = False
        self.missing_weights: list[str] = []
        self.validity: tuple[int, int] = (0, 0)
        self.streamable_weights = 0
        self.strategies: list[Any] = []
        self.alive = {"engine": 0, "context": 0}
        self.profile_switches = 0

        self.ILogger = FakeLogger
        self.TensorIOMode = Enumeration()
        self.TensorLocation = Enumeration()
        self.ExecutionContextAllocationStrategy = Enumeration()
        self.CudaGraphStrategy = Enumeration()
        self.DataType = SimpleNamespace(
            FLOAT="float32", HALF="float16", BF16="bfloat16", INT64="int64", INT32="int32", BOOL="bool"
        )
        self.EngineValidity = Enumeration({"VALID": 0, "SUBOPTIMAL": 1, "INVALID": 2})
        names = ("VERSION_MISMATCH", "UNSUPPORTED_CC", "OLD_CUDA_DRIVER", "OLD_CUDA_RUNTIME")
        names += ("INSUFFICIENT_GPU_MEMORY", "MALFORMED_ENGINE", "CUDA_ERROR")
        self.EngineInvalidityDiagnostics = Enumeration({name: 1 << i for i, name in enumerate(names)})

    def Runtime(self, logger: Any) -> FakeRuntime:
        return FakeRuntime(self, logger)

    def Refitter(self, engine: FakeEngine, logger: Any) -> FakeRefitter:
        return FakeRefitter(engine, logger)

    def OnnxParserRefitter(self, refitter: FakeRefitter, logger: Any) -> FakeOnnxParserRefitter:
        return FakeOnnxParserRefitter(refitter, logger)


class FakeLogger:
    INTERNAL_ERROR, ERROR, WARNING = range(3)

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class FakeRuntime:
    engine_header_size = 4

    def __init__(self, api: FakeTensorRT, logger: FakeLogger) -> None:
        self.api, self.logger = api, logger
        self.engine_host_code_allowed = False

    def get_engine_validity(self, header: bytes) -> tuple[int, int]:
        assert len(header) == self.engine_header_size
        if self.api.validity[0] == self.api.EngineValidity.INVALID:
            self.logger.log(FakeLogger.ERROR, "the header is of a lamp: In function look at /src/lamp.cpp:1")
        return self.api.validity

    def deserialize_cuda_engine(self, serialized: bytes) -> FakeEngine | None:
        if self.api.refuses_to_load:
            self.logger.log(FakeLogger.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: the plan is of a lamp")
            return None
        return FakeEngine(self.api, self.logger, self.api.models.get(serialized, self.api.model))


class FakeEngine:
    def __init__(self, api: FakeTensorRT, logger: FakeLogger, model: FakeModel) -> None:
        self.api, self.logger, self.model = api, logger, model
        self.num_io_tensors = len(self.model.tensors)
        self.num_optimization_profiles = len(self.model.profiles)
        self.device_memory_size_v2 = 512
        self.streamable_weights_size = api.streamable_weights
        self.weight_streaming_budget_v2 = api.streamable_weights
        self.weights, self.refitted = b"", False
        api.alive["engine"] += 1

    def __del__(self) -> None:
        self.api.alive["engine"] -= 1

    def get_tensor_name(self, index: int) -> str:
        return self.model.tensors[index].name

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.api.TensorIOMode
        return modes.INPUT if name in {tensor.name for tensor in self.model.inputs} else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> str:
        return next(tensor.dtype for tensor in self.model.tensors if tensor.name == name)

    def get_tensor_location(self, name: str) -> Any:
        return self.api.TensorLocation.DEVICE

    def serialize(self) -> bytes:
        assert self.refitted, "serialised without the new weights"
        return b"refitted with " + self.weights

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_graph_strategy=None)

    def create_execution_context(self, strategy_or_config: Any = "static", /) -> FakeContext | None:
        if self.api.context_fails:
            return None
        self.api.strategies.append(strategy_or_config)
        managed = strategy_or_config == self.api.ExecutionContextAllocationStrategy.USER_MANAGED
        return FakeContext(self, scratch_is_ours=managed)


class FakeRefitter:
    def __init__(self, engine: FakeEngine, logger: FakeLogger) -> None:
        self.engine, self.logger = engine, logger
        self.given = b""

    def get_missing_weights(self) -> list[str]:
        return self.engine.api.missing_weights

    def refit_cuda_engine(self) -> bool:
        assert self.given, "refitted before there were weights"
        self.engine.weights, self.engine.refitted = self.given, True
        return True


class FakeOnnxParserRefitter:
    def __init__(self, refitter: FakeRefitter, logger: FakeLogger) -> None:
        self.refitter, self.logger = refitter, logger

    def refit_from_bytes(self, model: bytes, path: str) -> bool:
        if self.refitter.engine.api.refuses_weights:
            self.logger.log(FakeLogger.ERROR, "the weights are of a lamp")
            return False
        self.refitter.given = hashlib.sha256(model).digest()
        return True


class FakeContext:
    """uploaded: what the GPU keeps of the shapes, set by the first run of them, and read by every run."""

    def __init__(self, engine: FakeEngine, scratch_is_ours: bool) -> None:
        self.engine, self.api, self.model = engine, engine.api, engine.model
        self.scratch: int | None = None if scratch_is_ours else 0
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.uploaded: dict[str, tuple[int, ...]] = {}
        self.api.alive["context"] += 1

    def __del__(self) -> None:
        self.api.alive["context"] -= 1

    def set_device_memory(self, memory: int, size: int) -> None:
        assert len(self.api.cuda.device[memory]) == size >= self.engine.device_memory_size_v2
        self.scratch = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self.profile = profile_index
        self.shapes = {}  # the real one forgets them too
        self.api.profile_switches += 1
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        assert self.profile is not None
        smallest, _, largest = self.model.profiles[self.profile][name]
        if not all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return [tensor.name for tensor in self.model.inputs if tensor.name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.model.output_shapes(self.shapes)[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory in self.api.cuda.device
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        assert self.scratch is not None, "ran without the scratch memory that it was to be given"
        assert not self.infer_shapes(), "ran without all shapes"
        assert set(self.addresses) == {tensor.name for tensor in self.model.tensors}, "ran without all addresses"
        capturing = self.api.cuda.capturing is not None
        if self.api.enqueue_fails or (capturing and self.api.capture_fails):
            self.engine.logger.log(FakeLogger.ERROR, "IExecutionContext::enqueueV3: Error Code 1: the lamp is off")
            return False
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if capturing:
            assert self.uploaded == shapes, "captured before a first run of the shape"
        else:
            self.api.cuda.queue(lambda: setattr(self, "uploaded", shapes))
        self.api.cuda.queue(lambda: self._compute(shapes, addresses))
        return True

    def _compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        """Do the work of the kernels, when their time has come."""
        assert self.uploaded == shapes, "a graph ran after its context was set to another shape"
        assert self.scratch in (0, *self.api.cuda.device), "the scratch memory is gone"
        memory = self.api.cuda.device
        feeds = {}
        for tensor in self.model.inputs:
            dtype = numpy_dtype(tensor.dtype)
            count = int(np.prod(shapes[tensor.name]))
            feeds[tensor.name] = np.frombuffer(memory[addresses[tensor.name]], dtype, count).reshape(
                shapes[tensor.name]
            )
        outputs = self.model.function(feeds)
        for tensor in self.model.outputs:
            result = outputs[tensor.name]
            assert result.dtype == numpy_dtype(tensor.dtype)
            assert result.shape == self.model.output_shapes(shapes)[tensor.name]
            assert result.nbytes <= len(memory[addresses[tensor.name]]), "wrote beyond the memory of an output"
            memory[addresses[tensor.name]][: result.nbytes] = result.tobytes()
