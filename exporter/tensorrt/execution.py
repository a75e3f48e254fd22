"""Loads an engine after checks, and runs it: contexts, memory, turns of threads, and the order of freeing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.dtypes import DTYPES, numpy_dtype
from effexport.base.errors import EffexportError, RuntimeFailedError, UserError
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.runners.options import RunOptions
from effexport.tensorrt.bindings import BuildLog, import_api, plain
from effexport.tensorrt.context import (
    EAGER_BYTES,
    Buffers,
    Call,
    Context,
    EngineRefusalError,
    Graphs,
    Shapes,
    largest_shapes,
    nbytes_of,
    shapes_of,
)
from effexport.tensorrt.cuda import Cuda, CudaError, DeviceMemory, open_cuda
from effexport.tensorrt.sidecar import (
    REBUILD,
    EngineInfo,
    Shape,
    check_engine_file,
    check_model,
    check_runs_here,
    read_sidecar,
)

if TYPE_CHECKING:
    from tensorrt import Api, ICudaEngine, IExecutionContext, IRuntimeConfig, Runtime

    from effexport.base.dtypes import Array


@dataclass(frozen=True)
class Source:
    """An engine that can be loaded here: its file is intact, and everything that running it needs is available."""

    path: Path
    info: EngineInfo
    api: Api
    cuda: Cuda


@dataclass
class Loaded:
    """A deserialised engine, with its runtime, which must outlive it, and their log."""

    engine: ICudaEngine | None
    runtime: Runtime | None
    log: BuildLog

    def close(self) -> None:
        self.engine = None
        self.runtime = None


def checked_sources(engines: Mapping[Path, str | None], api: Api | None, cuda: Cuda | None) -> tuple[Source, ...]:
    """Check what can be checked without TensorRT, cheapest first, and open the GPU, which all engines share.

    engines: their files, with the digest of the model that each should have been built from; None skips that check.
    Raises UserError and MissingExtraError.
    """
    infos = {path: read_sidecar(path) for path in engines}
    for path, onnx_sha256 in engines.items():
        check_engine_file(path, infos[path])
        if onnx_sha256 is not None:
            check_model(path, infos[path], onnx_sha256)
    target = next(iter(infos.values())).target
    api = api or import_api(target)
    cuda = cuda or open_cuda(ENGINE_RUNTIMES[target].package.extra)
    try:
        for path, info in infos.items():
            check_runs_here(path, info, api.__version__, cuda.compute_capability)
    except UserError:
        with cuda.selected():
            cuda.close()
        raise
    return tuple(Source(path, info, api, cuda) for path, info in infos.items())


def load_engine(source: Source) -> Loaded:
    """Deserialise an engine, and compare its tensors with the sidecar's.

    Raises UserError for an engine that TensorRT-RTX finds invalid here, and EffexportError if it cannot be loaded or
    differs from its sidecar.
    """
    api, info = source.api, source.info
    log = BuildLog(api)
    runtime = log.made(api.Runtime)
    serialized = source.path.read_bytes()
    if not ENGINE_RUNTIMES[info.target].built_where_it_runs:
        check_validity(source.path, api, runtime, serialized, log)
    elif info.version_compatible:
        # such an engine contains a lean runtime of its release, which is host code; we have verified its checksum
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(serialized)
    if engine is None:
        raise EffexportError(f"{ENGINE_RUNTIMES[info.target].label} does not load {source.path}: {said(log)}")
    check_tensors(source.path, api, engine, info)
    return Loaded(engine, runtime, log)


def check_validity(path: Path, api: Api, runtime: Runtime, serialized: bytes, log: BuildLog) -> None:
    """Raises UserError if TensorRT-RTX finds in the header of an engine that it does not run here."""
    validity, diagnostics = runtime.get_engine_validity(serialized[: runtime.engine_header_size])
    if validity != api.EngineValidity.INVALID:
        return
    kinds = api.EngineInvalidityDiagnostics
    rebuild = "build it again here with --target trt-rtx"
    words = {
        kinds.VERSION_MISMATCH: f"it is of another release of TensorRT-RTX than {api.__version__}: {rebuild}",
        kinds.UNSUPPORTED_CC: f"it was not built for this kind of GPU: {rebuild}",
        kinds.OLD_CUDA_DRIVER: "the driver is older than the one it needs: upgrade the NVIDIA driver",
        kinds.OLD_CUDA_RUNTIME: "the CUDA runtime is older than the one it needs: upgrade it",
        kinds.INSUFFICIENT_GPU_MEMORY: "the GPU has too little memory for it: free some, or use a larger one",
        kinds.MALFORMED_ENGINE: f"it is not an engine of TensorRT-RTX: {REBUILD}",
        kinds.CUDA_ERROR: "CUDA failed while TensorRT-RTX looked at the GPU: check it with nvidia-smi",
    }
    reasons = [text for kind, text in words.items() if int(diagnostics) & int(kind)]
    raise UserError(f"TensorRT-RTX does not run {path}: {'; '.join(reasons) or said(log)}")


def check_tensors(path: Path, api: Api, engine: ICudaEngine, info: EngineInfo) -> None:
    """Raises EffexportError unless the engine has the inputs, outputs, dtypes and profiles of its sidecar."""
    # a release need not have every type
    named = {dtype.tensorrt: name for name, dtype in DTYPES.items() if dtype.tensorrt}
    dtypes = {getattr(api.DataType, member): name for member, name in named.items() if hasattr(api.DataType, member)}
    found, expected = [], []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = "input" if engine.get_tensor_mode(name) == api.TensorIOMode.INPUT else "output"
        dtype = engine.get_tensor_dtype(name)
        found.append(f"{kind} {name} {dtypes.get(dtype, dtype)}")
        if engine.get_tensor_location(name) != api.TensorLocation.DEVICE:
            raise EffexportError(f"{path}: {kind} {name!r} lives in host memory, which effexport does not support")
    for kind, tensors in (("input", info.inputs), ("output", info.outputs)):
        expected += [f"{kind} {tensor.name} {tensor.dtype}" for tensor in tensors]
    if sorted(found) != sorted(expected):
        raise EffexportError(f"{path} has {', '.join(found)}; its sidecar says {', '.join(expected)}; {REBUILD}")
    if engine.num_optimization_profiles != len(info.profiles):
        raise EffexportError(
            f"{path} has {engine.num_optimization_profiles} profiles; its sidecar says {len(info.profiles)}; {REBUILD}"
        )


def said(log: BuildLog) -> str:
    """The first error that TensorRT logged."""
    return plain(log.errors[0]) if log.errors else "it gave no reason"


class Work:
    """The memory of inputs and outputs, and the graphs of their runs. Only for callers inside `Execution.turn`."""

    def __init__(self, cuda: Cuda, main: Context, graphs: Graphs, buffers: Buffers) -> None:
        self._cuda = cuda
        self._main = main
        self._graphs = graphs
        self.buffers = buffers
        self._call: Call | None = None
        self._output_shapes: dict[str, Shape] = {}

    def prepare(self, profile: int, shapes: Shapes) -> None:
        """Allocate for a run of these shapes. Raises EngineRefusalError, UserError for a tensor without elements, which
        would have no address, and EffexportError if memory runs out."""
        output_shapes = dict(self._main.output_shapes(profile, shapes))
        room = {**dict(shapes), **output_shapes}
        for name, shape in room.items():
            if 0 in shape:
                raise UserError(
                    f"{name!r} is {list(shape)}, which is empty, for inputs {listed(dict(shapes))}; engines need at "
                    "least one element in every input and output: give larger inputs, or use --runtime ort-cuda, or "
                    "ort on the CPU"
                )
        self._output_shapes = output_shapes
        self.buffers.reserve(room)
        self._call = Call(profile, shapes, tuple((name, self.buffers.address(name)) for name in room))

    def write(self, feeds: Mapping[str, Array]) -> None:
        """Queue copies of inputs to the device."""
        for name, array in feeds.items():
            self.buffers.write(name, array)

    def launch(self) -> None:
        """Queue a run. Raises EngineRefusalError and CudaError."""
        assert self._call is not None, "prepare comes first"
        self._graphs.run(self._call)

    def fetch(self, names: Collection[str] | None = None) -> dict[str, Array]:
        """Wait for the queued work, and return copies of the outputs, or of those that are named."""
        shapes = self._output_shapes
        return self.read({name: shape for name, shape in shapes.items() if names is None or name in names})

    def read(self, shapes: Mapping[str, Shape]) -> dict[str, Array]:
        """Wait for the queued work, and return copies of any tensors."""
        for name, shape in shapes.items():
            self.buffers.fetch(name, shape)
        self._cuda.synchronize()
        return {name: self.buffers.read(name, shape) for name, shape in shapes.items()}

    def close(self) -> None:
        self._graphs.close()
        self.buffers.close()


class Execution:
    """A loaded engine with its contexts and memory, which are freed once and in order.

    captures: whether we capture runs as graphs. TensorRT-RTX, which finishes engines where they run, does so itself: it
    compiles kernels for a shape while the first runs use slower ones, and knows when a graph is worth capturing.
    abandoned: work whose owner is gone. Python may collect it in any thread at any time, but CUDA accepts no calls
    during a capture. It is freed when nothing is queued: when the next turn begins, or when one has failed.
    """

    def __init__(self, source: Source, settings: RunOptions, host: Execution | None = None) -> None:
        """host: an execution on the same stream, whose lock and memory of inputs and outputs this one uses too. Close
        this one first.

        Raises UserError and EffexportError as `load_engine` does, and CudaError; everything is freed then.
        """
        self.cuda = source.cuda
        self._source, self._settings, self._host = source, settings, host
        self._title = ENGINE_RUNTIMES[source.info.target].label
        self.captures = settings.cuda_graph and ENGINE_RUNTIMES[source.info.target].built_where_it_runs
        self.abandoned: deque[Work] = deque()
        self._works: list[Work] = []
        self._lock: threading.Lock = host._lock if host else threading.Lock()
        self._closed = False
        self._scratch: DeviceMemory | None = None
        self._config: IRuntimeConfig | None = None  # must live as long as its context
        self._cleanup = ExitStack()  # frees in the reverse order
        if host is None:
            self._cleanup.callback(self.cuda.close)
        try:
            with self.cuda.selected():
                self._load()
        except EngineRefusalError as error:
            self.close()
            raise EffexportError(f"{self._title} does not run {source.path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        info = self._source.info
        self._loaded = load_engine(self._source)
        self._cleanup.callback(self._loaded.close)
        self._stream_weights(engine_of(self._loaded))
        if self.captures:
            # its size depends on the weights that are streamed
            scratch = self._scratch = self.cuda.allocate(max(1, engine_of(self._loaded).device_memory_size_v2))
            self._cleanup.callback(lambda: self.cuda.free(scratch))
        self._main = self._new_context()
        self._cleanup.callback(self._main.close)
        tensors = (*info.inputs, *info.outputs)
        largest = largest_shapes(info)
        maxima = {t.name: nbytes_of(largest[t.name], numpy_dtype(t.dtype)) for t in tensors if t.name in largest}
        # used by `run`; `bind` makes others
        buffers = self._host.shared.buffers if self._host else Buffers(self.cuda)
        buffers.add(tensors, maxima)
        self.shared: Work = self._new_work(self._settings.max_graphs, buffers)
        if self._host is None and sum(maxima.values()) <= EAGER_BYTES:
            self.shared.buffers.reserve(largest)

    def _stream_weights(self, engine: ICudaEngine) -> None:
        budget = self._settings.weight_streaming_budget_bytes
        if budget is None:
            return
        streamable = engine.streamable_weights_size
        if not streamable:
            raise UserError(
                f"{self._source.path} was built without weight streaming, so a budget does not apply; leave it out, or "
                "build the engine again with weight_streaming in [engine] of a spec file"
            )
        # a budget for all weights means that nothing is streamed
        engine.weight_streaming_budget_v2 = min(budget, streamable)

    def _new_context(self) -> Context:
        """Raises EngineRefusalError."""
        created = self._create_context(engine_of(self._loaded))
        if created is None:
            raise EngineRefusalError(f"it creates no execution context: {said(self._loaded.log)}")
        if self._scratch is not None:
            created.set_device_memory(self._scratch.address, self._scratch.nbytes)
        outputs = [tensor.name for tensor in self._source.info.outputs]
        return Context(created, outputs, self.cuda.stream_handle)

    def _create_context(self, engine: ICudaEngine) -> IExecutionContext | None:
        api = self._source.api
        if self.captures:
            # runs take turns, so the contexts of all graphs can share one scratch memory
            return engine.create_execution_context(api.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._settings.cuda_graph:
            config = self._config = engine.create_runtime_config()
            config.cuda_graph_strategy = api.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            return engine.create_execution_context(config)
        return engine.create_execution_context()

    def new_work(self, max_graphs: int) -> Work:
        """New memory for runs, freed once it is in `abandoned`, or when this is closed."""
        buffers = Buffers(self.cuda)
        buffers.add((*self._source.info.inputs, *self._source.info.outputs))
        return self._new_work(max_graphs, buffers)

    def _new_work(self, max_graphs: int, buffers: Buffers) -> Work:
        graphs = Graphs(self.cuda, self._main, self._new_context, max_graphs if self.captures else 0)
        work = Work(self.cuda, self._main, graphs, buffers)
        self._works.append(work)
        return work

    def _sweep(self) -> None:
        while self.abandoned:
            work = self.abandoned.popleft()
            self._works.remove(work)
            work.close()

    @contextmanager
    def turn(self, feeds: Mapping[str, Array] | None) -> Iterator[None]:
        """Exclusive use of the engine. feeds: the inputs, for error messages; None for bound inputs.

        Raises EffexportError once this is closed, and RuntimeFailedError if TensorRT or CUDA fails inside.
        """
        with self._lock:
            self.require_open()
            try:
                with self.cuda.selected():
                    self._loaded.log.restart()
                    self._sweep()
                    try:
                        yield
                    except BaseException:
                        # queued work still reads and writes the memory that the next turn uses
                        with suppress(CudaError):
                            self.cuda.synchronize()
                        self._sweep()
                        raise
            except (EngineRefusalError, CudaError) as error:
                shapes = "bound inputs" if feeds is None else listed(dict(shapes_of(feeds)))
                log = self._loaded.log
                reason = f"{error} (TensorRT reports: {said(log)})" if log.errors else str(error)
                raise RuntimeFailedError(f"{self._title} failed on {shapes}: {reason}") from error

    def require_open(self) -> None:
        if self._closed:
            raise EffexportError("this runner is closed; load the engine again")

    def close(self) -> None:
        """Free everything, in order. After a failure of the GPU, freeing fails too and is not needed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(CudaError), self.cuda.selected():
                with suppress(CudaError):
                    self.cuda.synchronize()
                for work in self._works:
                    with suppress(CudaError):
                        work.close()
                self._works.clear()
                self.abandoned.clear()
                self._config = None
                self._cleanup.close()


def engine_of(loaded: Loaded) -> ICudaEngine:
    assert loaded.engine is not None, "this engine is closed"
    return loaded.engine


def listed(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
