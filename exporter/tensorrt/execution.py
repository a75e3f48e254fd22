"""Loads an engine after checks, and runs it: contexts, graphs, turns of threads, and the order of freeing."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.base.dtypes import DTYPES
from effexport.base.errors import EffexportError, GraphWarning, RuntimeFailedError, UserError
from effexport.base.runtimes import ENGINE_RUNTIMES, REBUILD_ENGINE
from effexport.runners.cuda import EAGER_BYTES, Buffers, Cuda, CudaError, Memory, open_cuda
from effexport.runners.options import RunOptions
from effexport.tensorrt.bindings import BuildLog, import_api, make_runtime
from effexport.tensorrt.sidecar import EngineInfo, Shape, check_engine_file, check_model, check_runs_here, read_sidecar
from effexport.tensorrt.spec import Profiles

if TYPE_CHECKING:
    from tensorrt import Api, ICudaEngine, IExecutionContext, Runtime

    from effexport.base.dtypes import Array


@dataclass(frozen=True)
class Source:
    """An engine that can be loaded here: its file is intact, and everything that running it needs is available."""

    path: Path
    info: EngineInfo
    api: Api
    cuda: Cuda


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


def load_engine(source: Source, log: BuildLog) -> tuple[Runtime, ICudaEngine]:
    """Deserialise an engine, and compare its tensors with the sidecar's. The runtime must outlive it.

    Raises UserError for an engine that TensorRT-RTX finds invalid here, and EffexportError if it cannot be loaded or
    differs from its sidecar.
    """
    api, info = source.api, source.info
    runtime = make_runtime(api, log, info.version_compatible)  # we have verified the checksum of the engine
    serialized = source.path.read_bytes()
    if not ENGINE_RUNTIMES[info.target].built_where_it_runs:
        check_validity(source.path, api, runtime, serialized, log)
    engine = runtime.deserialize_cuda_engine(serialized)
    if engine is None:
        raise EffexportError(f"{ENGINE_RUNTIMES[info.target].label} does not load {source.path}: {log.said}")
    check_tensors(source.path, api, engine, info)
    return runtime, engine


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
        kinds.MALFORMED_ENGINE: f"it is not an engine of TensorRT-RTX: {REBUILD_ENGINE}",
        kinds.CUDA_ERROR: "CUDA failed while TensorRT-RTX looked at the GPU: check it with nvidia-smi",
    }
    reasons = [text for kind, text in words.items() if int(diagnostics) & int(kind)]
    raise UserError(f"TensorRT-RTX does not run {path}: {'; '.join(reasons) or log.said}")


def check_tensors(path: Path, api: Api, engine: ICudaEngine, info: EngineInfo) -> None:
    """Raises EffexportError unless the engine has the inputs, outputs, dtypes and profiles of its sidecar."""
    # a release need not have every type
    named = {dtype.tensorrt: name for name, dtype in DTYPES.items() if dtype.tensorrt}
    dtypes = {getattr(api.DataType, member): name for member, name in named.items() if hasattr(api.DataType, member)}
    found = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = "input" if engine.get_tensor_mode(name) == api.TensorIOMode.INPUT else "output"
        dtype = engine.get_tensor_dtype(name)
        found.append(f"{kind} {name} {dtypes.get(dtype, dtype)}")
        if engine.get_tensor_location(name) != api.TensorLocation.DEVICE:
            raise EffexportError(f"{path}: {kind} {name!r} lives in host memory, which effexport does not support")
    expected = [f"input {tensor.name} {tensor.dtype}" for tensor in info.inputs]
    expected += [f"output {tensor.name} {tensor.dtype}" for tensor in info.outputs]
    if sorted(found) != sorted(expected):
        raise EffexportError(f"{path} has {', '.join(found)}; its sidecar says {', '.join(expected)}; {REBUILD_ENGINE}")
    if engine.num_optimization_profiles != len(info.profiles):
        raise EffexportError(
            f"{path} has {engine.num_optimization_profiles} profiles; its sidecar says {len(info.profiles)}; "
            f"{REBUILD_ENGINE}"
        )


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class EngineRefusalError(Exception):
    """TensorRT returned False. A caller that knows what was being done turns this into an error for users."""


@dataclass(frozen=True)
class Call:
    """Everything but values that a run depends on: profile, shapes of inputs, addresses of inputs and outputs."""

    profile: int
    shapes: Shapes
    addresses: tuple[tuple[str, int], ...]


class Context:
    """An execution context with its present settings, so that a run of the same shapes sets nothing again."""

    def __init__(self, context: IExecutionContext, outputs: Sequence[str], stream_handle: int) -> None:
        self._context = context
        self._outputs = tuple(outputs)
        self._stream_handle = stream_handle
        self._profile: int | None = None
        self._shapes: Shapes | None = None
        self._addresses: tuple[tuple[str, int], ...] | None = None
        self._output_shapes: dict[str, Shape] = {}

    def output_shapes(self, profile: int, shapes: Shapes) -> dict[str, Shape]:
        """Set the shapes of the inputs, and return those of the outputs. Raises EngineRefusalError."""
        if (profile, shapes) != (self._profile, self._shapes):
            self._set_shapes(profile, shapes)
        return self._output_shapes

    def _set_shapes(self, profile: int, shapes: Shapes) -> None:
        context = self._context
        self._shapes = None  # until everything is set
        if profile != self._profile:
            self._profile = None
            if not context.set_optimization_profile_async(profile, self._stream_handle):
                raise EngineRefusalError(f"it does not switch to profile {profile}")
            self._profile = profile
        for name, shape in shapes:
            if not context.set_input_shape(name, shape):
                raise EngineRefusalError(f"it does not take {name} {list(shape)}")
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise EngineRefusalError(f"it cannot infer the shapes of its outputs: {error}") from error
        if missing:
            raise EngineRefusalError(f"it cannot infer the shapes of its outputs without {', '.join(missing)}")
        self._output_shapes = {name: tuple(context.get_tensor_shape(name)) for name in self._outputs}
        for name, shape in self._output_shapes.items():
            if any(size < 0 for size in shape):
                raise EngineRefusalError(f"the shape of output {name} depends on values: {list(shape)}")
        self._shapes = shapes

    def run(self, call: Call) -> None:
        """Queue a run. Raises EngineRefusalError."""
        self.output_shapes(call.profile, call.shapes)
        if call.addresses != self._addresses:
            self._addresses = None
            for name, address in call.addresses:
                if not self._context.set_tensor_address(name, address):
                    raise EngineRefusalError(f"it does not take the address of {name}")
            self._addresses = call.addresses
        self.enqueue()

    def enqueue(self) -> None:
        """Queue the same run again. Raises EngineRefusalError."""
        if not self._context.execute_async_v3(self._stream_handle):
            raise EngineRefusalError("it does not start the run")

    def close(self) -> None:
        """Free it, whoever still holds this object."""
        del self._context


@dataclass(frozen=True)
class Captured:
    """A graph and the context it was captured in, which holds the shapes that the graph reads."""

    context: Context
    graph: Any


# What is known of a call: its graph, or that it was seen once, or that no graph of it could be captured.
Entry = Captured | Literal["seen", "refused"]


class RunMemory:
    """The memory of inputs and outputs of runs, and their graphs. Only for callers inside `Execution.turn`.

    The first run of a shape is queued without a graph, the second while one is captured, later ones by the graph. It
    belongs to the context that it was captured in: if another shape were set there, the graph would read data of that
    shape. NVIDIA recommends a context per graph, all of which share their scratch memory; `new_context` makes one. Only
    the `most_graphs` calls used last are remembered; 0 disables graphs.
    """

    def __init__(
        self, cuda: Cuda, buffers: Buffers, main: Context, new_context: Callable[[], Context], most_graphs: int
    ) -> None:
        self.buffers = buffers
        self._cuda = cuda
        self._main, self._new_context = main, new_context
        self._most_graphs = most_graphs
        self._entries: OrderedDict[Call, Entry] = OrderedDict()
        self._warned = False
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
                    f"{name!r} is {list(shape)}, which is empty, for inputs {listed(shapes)}; engines need at least "
                    "one element in every input and output: give larger inputs, or use --runtime ort-cuda, or ort on "
                    "the CPU"
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
        call = self._call
        assert call is not None, "prepare comes first"
        entry = self._entries.get(call)
        if isinstance(entry, Captured):
            self._cuda.launch(entry.graph)
        elif entry == "seen":
            entry = self._captured(call)
        else:
            self._main.run(call)
        if self._most_graphs > 0:
            self._entries[call] = entry or "seen"
            self._entries.move_to_end(call)
            while len(self._entries) > self._most_graphs:
                self._release(self._entries.popitem(last=False)[1])

    def _captured(self, call: Call) -> Entry:
        """Run a call in a context of its own, then capture a second run, which is not executed."""
        try:
            context = self._new_context()
        except (EngineRefusalError, CudaError) as error:
            self._warn(error)
            self._main.run(call)
            return "refused"
        try:
            # the first run of a shape uploads data that TensorRT derives from it, which must not be in the graph
            context.run(call)
            self._cuda.synchronize()
        except BaseException:
            context.close()
            raise
        try:
            return Captured(context, self._cuda.capture(context.enqueue))
        except (EngineRefusalError, CudaError) as error:
            context.close()
            self._warn(error)
            return "refused"

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a CUDA graph could not be captured, so runs continue without one: {error}", GraphWarning, stacklevel=2
            )

    def _release(self, entry: Entry) -> None:
        if isinstance(entry, Captured):
            self._cuda.destroy(entry.graph)
            entry.context.close()

    def fetch(self, but: Collection[str] = ()) -> dict[str, Array]:
        """Wait for the queued work, and return copies of the outputs, except for those that are named."""
        return self.read({name: shape for name, shape in self._output_shapes.items() if name not in but})

    def read(self, shapes: Mapping[str, Shape]) -> dict[str, Array]:
        """Wait for the queued work, and return copies of any tensors."""
        for name, shape in shapes.items():
            self.buffers.fetch(name, shape)
        self._cuda.synchronize()
        return {name: self.buffers.read(name, shape) for name, shape in shapes.items()}

    def close(self) -> None:
        while self._entries:
            self._release(self._entries.popitem()[1])
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
        self._source, self._settings = source, settings
        self._title = ENGINE_RUNTIMES[source.info.target].label
        self.captures = settings.cuda_graph and ENGINE_RUNTIMES[source.info.target].built_where_it_runs
        self.abandoned: deque[RunMemory] = deque()
        self._works: list[RunMemory] = []
        self._lock: threading.Lock = host._lock if host else threading.Lock()
        self._closed = False
        self._log = BuildLog(source.api)
        self._scratch: Memory | None = None
        self._config: Any = None  # must live as long as its context
        self._cleanup = ExitStack()  # frees in the reverse order
        if host is None:
            self._cleanup.callback(self.cuda.close)
        try:
            with self.cuda.selected():
                self._load(host)
        except EngineRefusalError as error:
            self.close()
            raise EffexportError(f"{self._title} does not run {source.path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _load(self, host: Execution | None) -> None:
        self._runtime, self._engine = load_engine(self._source, self._log)
        self._cleanup.callback(self._unload)
        self._stream_weights()
        if self.captures:
            # its size depends on the weights that are streamed
            scratch = self._scratch = self.cuda.allocate(max(1, self._engine.device_memory_size_v2))
            self._cleanup.callback(lambda: self.cuda.free(scratch))
        self._main = self._new_context()
        self._cleanup.callback(self._main.close)
        # used by `run`; `bind` makes others
        buffers = host.shared.buffers if host else Buffers(self.cuda)
        largest = Profiles(self._source.info).largest_shapes()
        self.shared: RunMemory = self.new_work(self._settings.max_graphs, buffers, largest)
        if host is None and buffers.nbytes_of(largest) <= EAGER_BYTES:
            buffers.reserve(largest)

    def _unload(self) -> None:
        del self._engine, self._runtime

    def _stream_weights(self) -> None:
        budget = self._settings.weight_streaming_budget_bytes
        if budget is None:
            return
        streamable = self._engine.streamable_weights_size
        if not streamable:
            raise UserError(
                f"{self._source.path} was built without weight streaming, so a budget does not apply; leave it out, or "
                "build the engine again with weight_streaming in [engine] of a spec file"
            )
        # a budget for all weights means that nothing is streamed
        self._engine.weight_streaming_budget_v2 = min(budget, streamable)

    def _new_context(self) -> Context:
        """Raises EngineRefusalError."""
        created = self._create_context(self._source.api, self._engine)
        if created is None:
            raise EngineRefusalError(f"it creates no execution context: {self._log.said}")
        if self._scratch is not None:
            created.set_device_memory(self._scratch.address, self._scratch.nbytes)
        outputs = [tensor.name for tensor in self._source.info.outputs]
        return Context(created, outputs, self.cuda.stream_handle)

    def _create_context(self, api: Api, engine: ICudaEngine) -> IExecutionContext | None:
        if self.captures:
            # runs take turns, so the contexts of all graphs can share one scratch memory
            return engine.create_execution_context(api.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._settings.cuda_graph:
            config = self._config = engine.create_runtime_config()
            config.cuda_graph_strategy = api.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            return engine.create_execution_context(config)
        return engine.create_execution_context()

    def new_work(
        self, max_graphs: int, buffers: Buffers | None = None, largest: Mapping[str, Shape] | None = None
    ) -> RunMemory:
        """Memory of runs, by default with own buffers, freed once it is in `abandoned`, or when this is closed."""
        buffers = buffers or Buffers(self.cuda)
        buffers.add((*self._source.info.inputs, *self._source.info.outputs), largest or {})
        most_graphs = max_graphs if self.captures else 0
        self._works.append(RunMemory(self.cuda, buffers, self._main, self._new_context, most_graphs))
        return self._works[-1]

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
                    self._log.restart()
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
                shapes = "bound inputs" if feeds is None else listed(shapes_of(feeds))
                reported = f" (TensorRT reports: {self._log.said})" if self._log.errors else ""
                raise RuntimeFailedError(f"{self._title} failed on {shapes}: {error}{reported}") from error

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


def listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes)


def shapes_of(arrays: Mapping[str, Array]) -> Shapes:
    return tuple((name, tuple(array.shape)) for name, array in arrays.items())
