"""A loaded engine at work: its contexts and memory, turns of threads, and the order in which all of it is freed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.dtypes import numpy_dtype
from effexport.engines.api import ICudaEngine, IExecutionContext, IRuntimeConfig
from effexport.engines.sidecar import Shape
from effexport.errors import EffexportError, RuntimeFailedError, UserError
from effexport.runners.cuda.device import Cuda, CudaError, DeviceMemory
from effexport.runners.trt.context import Call, Context, EngineRefusalError, Graphs, Shapes, shapes_of
from effexport.runners.trt.loading import Loaded, Source, load_engine, said
from effexport.runners.trt.memory import EAGER_BYTES, Buffers, largest_shapes, nbytes_of
from effexport.runtimes import ENGINE_RUNTIMES

if TYPE_CHECKING:
    from effexport.dtypes import Array


@dataclass(frozen=True)
class TrtSettings:
    """How TensorRT runs an engine, on the GPU that is current in the thread that loads it.

    cuda_graph: from the second run of a shape on, launch the engine as one CUDA graph.
    max_graphs: the most shapes that have a graph at a time; the least recently used one is dropped. Ignored by
    TensorRT-RTX, which manages graphs itself.
    weight_streaming_budget_bytes: how much of the streamable weights stays on the GPU; None leaves it to TensorRT.
    Only for engines built with weight_streaming.
    """

    cuda_graph: bool = False
    max_graphs: int = 8
    weight_streaming_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_graphs < 1:
            raise UserError(f"max_graphs is {self.max_graphs}; expected at least 1; cuda_graph=False disables graphs")
        budget = self.weight_streaming_budget_bytes
        if budget is not None and budget < 0:
            raise UserError(f"the weight streaming budget is {budget} bytes; expected at least 0")


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

    def reserve(self, shapes: Mapping[str, Shape]) -> None:
        self.buffers.reserve(shapes)

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

    def swap(self, first: str, second: str) -> None:
        """Let two tensors exchange their memory, before the next `prepare`."""
        self.buffers.swap(first, second)

    def close(self) -> None:
        self._graphs.close()
        self.buffers.close()


class Execution:
    """A loaded engine with its contexts and memory, which are freed once and in order.

    captures: whether we capture runs as graphs. TensorRT-RTX does so itself: it compiles kernels for a shape while the
    first runs use slower ones, and only it knows when a graph is worth capturing.
    abandoned: work whose owner is gone. Python may collect it in any thread at any time, but CUDA accepts no calls
    during a capture. It is freed when nothing is queued: when the next turn begins, or when one has failed.
    """

    def __init__(self, source: Source, settings: TrtSettings, host: Execution | None = None) -> None:
        """host: an execution on the same stream, whose lock and memory of inputs and outputs this one uses too. Close
        this one first.

        Raises UserError and EffexportError as `load_engine` does, and CudaError; everything is freed then.
        """
        self.cuda = source.cuda
        self._source, self._settings, self._host = source, settings, host
        self._title = ENGINE_RUNTIMES[source.info.target].label
        self.captures = settings.cuda_graph and source.info.target == "trt"
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
            self.shared.reserve(largest)

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
