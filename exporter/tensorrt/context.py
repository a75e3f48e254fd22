"""Execution contexts of TensorRT, and CUDA graphs of what they queue."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from effexport.errors import GraphWarning
from effexport.tensorrt.cuda import Cuda, CudaError

if TYPE_CHECKING:
    from tensorrt import IExecutionContext

    from effexport.tensorrt.sidecar import Shape

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
        self._context: IExecutionContext | None = context
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
        context = self._opened()
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
                if not self._opened().set_tensor_address(name, address):
                    raise EngineRefusalError(f"it does not take the address of {name}")
            self._addresses = call.addresses
        self.enqueue()

    def enqueue(self) -> None:
        """Queue the same run again. Raises EngineRefusalError."""
        if not self._opened().execute_async_v3(self._stream_handle):
            raise EngineRefusalError("it does not start the run")

    def _opened(self) -> IExecutionContext:
        assert self._context is not None, "this context is closed"
        return self._context

    def close(self) -> None:
        self._context = None


@dataclass(frozen=True)
class Captured:
    """A graph and the context it was captured in, which holds the shapes that the graph reads."""

    context: Context
    graph: Any


class Plain(Enum):
    """The state of a call without a graph: seen once, or refused because no graph could be captured."""

    SEEN = 0
    REFUSED = 1


class Graphs:
    """Queues calls: the first of a kind without a graph, the second while capturing one, later ones by the graph.

    A captured graph belongs to its context: if another shape were set there, the graph would read data of that shape.
    NVIDIA recommends a context per graph, all of which share their scratch memory; `new_context` makes one. Only the
    `limit` calls used last are remembered; 0 disables graphs. The caller holds the lock of `cuda`.
    """

    def __init__(self, cuda: Cuda, main: Context, new_context: Callable[[], Context], limit: int) -> None:
        self._cuda = cuda
        self._main = main
        self._new_context = new_context
        self._limit = limit
        self._entries: OrderedDict[Call, Captured | Plain] = OrderedDict()
        self._warned = False

    def run(self, call: Call) -> None:
        """Queue a run. Raises EngineRefusalError and CudaError."""
        entry = self._entries.get(call)
        if isinstance(entry, Captured):
            self._cuda.launch(entry.graph)
        elif entry is Plain.SEEN:
            entry = self._captured(call)
        else:
            self._main.run(call)
        if self._limit > 0:
            self._remember(call, entry or Plain.SEEN)

    def _captured(self, call: Call) -> Captured | Plain:
        """Run a call in a context of its own, then capture a second run, which is not executed."""
        try:
            context = self._new_context()
        except (EngineRefusalError, CudaError) as error:
            self._warn(error)
            self._main.run(call)
            return Plain.REFUSED
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
            return Plain.REFUSED

    def _remember(self, call: Call, entry: Captured | Plain) -> None:
        self._entries[call] = entry
        self._entries.move_to_end(call)
        while len(self._entries) > self._limit:
            self._release(self._entries.popitem(last=False)[1])

    def _release(self, entry: Captured | Plain) -> None:
        if isinstance(entry, Captured):
            self._cuda.destroy(entry.graph)
            entry.context.close()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a CUDA graph could not be captured, so runs continue without one: {error}", GraphWarning, stacklevel=2
            )

    def close(self) -> None:
        while self._entries:
            self._release(self._entries.popitem()[1])


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    return tuple((name, tuple(array.shape)) for name, array in arrays.items())
