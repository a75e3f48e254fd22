"""Parts of a running engine: memory, the profile that covers a run, execution contexts and their CUDA graphs."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.base.errors import EffexportError, GraphWarning, UserError
from effexport.models.size_formula import shape_of
from effexport.models.validation import SpecError
from effexport.tensorrt.cuda import Cuda, CudaError, DeviceMemory, PinnedMemory

if TYPE_CHECKING:
    from tensorrt import IExecutionContext

    from effexport.base.dtypes import Array
    from effexport.tensorrt.sidecar import EngineInfo, Shape, ShapeRange


# A runner allocates for the largest shapes of its profiles at once if they need no more than this. Otherwise memory
# grows with the runs: a profile up to 65536 tokens does not mean that such runs happen.
EAGER_BYTES = 256 * 2**20


@dataclass
class Buffer:
    """The memory of one tensor on the GPU and on the host. nbytes: the size of each of the two."""

    device: DeviceMemory | None = None
    pinned: PinnedMemory | None = None
    nbytes: int = 0


class Buffers:
    """Memory of tensors, which grows with the largest run and never shrinks. The caller holds the lock of `cuda`."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._maxima: dict[str, int] = {}
        self._dtypes: dict[str, np.dtype[np.generic]] = {}
        self._buffers: dict[str, Buffer] = {}

    def add(self, tensors: Sequence[TensorInfo], maxima: Mapping[str, int] | None = None) -> None:
        """Tensors to keep memory for. One that is known already, from another engine, keeps its memory.

        maxima: per tensor, the bytes of its largest shape, if known: memory grows by doubling up to this size.
        """
        for tensor in tensors:
            self._dtypes[tensor.name] = numpy_dtype(tensor.dtype)
            self._buffers.setdefault(tensor.name, Buffer())
        for name, nbytes in (maxima or {}).items():
            self._maxima[name] = max(nbytes, self._maxima.get(name, 0))

    def swap(self, first: str, second: str) -> None:
        """Let two tensors exchange their memory, before the next run is prepared."""
        self._buffers[first], self._buffers[second] = self._buffers[second], self._buffers[first]

    def reserve(self, shapes: Mapping[str, Shape]) -> None:
        """Allocate for these shapes. Tensors that grow get a new address and lose their contents.

        Raises EffexportError if memory runs out; other tensors keep theirs.
        """
        for name, shape in shapes.items():
            needed = nbytes_of(shape, self._dtypes[name])
            buffer = self._buffers[name]
            if needed > buffer.nbytes:
                doubled = min(2 * buffer.nbytes, self._maxima.get(name, needed))
                self._replace(name, buffer, max(needed, doubled))

    def _replace(self, name: str, buffer: Buffer, nbytes: int) -> None:
        cuda = self._cuda
        self._free(buffer)
        try:
            buffer.device = cuda.allocate(nbytes)
            buffer.pinned = cuda.allocate_pinned(nbytes)
        except CudaError as error:
            free, total = cuda.memory_info()
            raise EffexportError(
                f"{name!r} needs {nbytes:,} bytes on the GPU and as many pinned on the host, which are not available "
                f"({error}; the GPU has {free:,} bytes free of {total:,}); run smaller batches, or free memory"
            ) from error
        buffer.nbytes = nbytes

    def address(self, name: str) -> int:
        return self._reserved(name)[0].address

    def _reserved(self, name: str) -> tuple[DeviceMemory, PinnedMemory]:
        buffer = self._buffers[name]
        assert buffer.device is not None, "reserve comes first"
        assert buffer.pinned is not None, "reserve comes first"
        return buffer.device, buffer.pinned

    def write(self, name: str, array: Array) -> None:
        """Queue a copy of an array to the device. The array may be changed as soon as this returns."""
        device, pinned = self._reserved(name)
        np.copyto(self._view(pinned, name, array.shape), array, casting="no")
        self._cuda.copy_to_device(device, pinned, array.nbytes)

    def fetch(self, name: str, shape: Shape) -> None:
        """Queue a copy of a tensor to the host. `read` returns it after the next `synchronize`."""
        device, pinned = self._reserved(name)
        self._cuda.copy_to_host(pinned, device, nbytes_of(shape, self._dtypes[name]))

    def read(self, name: str, shape: Shape) -> Array:
        """A copy of what `fetch` copied to the host, where the next run overwrites it."""
        return self._view(self._reserved(name)[1], name, shape).copy()

    def _view(self, pinned: PinnedMemory, name: str, shape: Shape) -> Array:
        dtype = self._dtypes[name]
        return pinned.array[: nbytes_of(shape, dtype)].view(dtype).reshape(shape)

    def _free(self, buffer: Buffer) -> None:
        device, pinned = buffer.device, buffer.pinned
        buffer.device, buffer.pinned, buffer.nbytes = None, None, 0
        if device is not None:
            self._cuda.free(device)
        if pinned is not None:
            self._cuda.free_pinned(pinned)

    def close(self) -> None:
        for buffer in self._buffers.values():
            self._free(buffer)


def nbytes_of(shape: Shape, dtype: np.dtype[np.generic]) -> int:
    return math.prod(shape) * dtype.itemsize


def largest_shapes(info: EngineInfo) -> dict[str, Shape]:
    """Per tensor, the shape in any profile that takes the most memory.

    Without outputs that have a dimension which no input has: only a run shows its size.
    """
    largest: dict[str, Shape] = {}
    for profile in info.profiles:
        sizes = {dim: high for dim, (_, high) in dim_ranges(info.inputs, profile).items()}
        for tensor in (*info.inputs, *info.outputs):
            shape = profile[tensor.name][2] if tensor.name in profile else resolved(tensor, sizes)
            if shape is not None and math.prod(shape) > math.prod(largest.get(tensor.name, (0,))):
                largest[tensor.name] = shape
    return largest


def resolved(tensor: TensorInfo, sizes: Mapping[str, int]) -> Shape | None:
    try:
        return shape_of(tensor.dims, sizes)
    except (KeyError, SpecError):  # a dimension that no input has, or a name of other tools
        return None


def dim_ranges(inputs: Sequence[TensorInfo], profile: Mapping[str, ShapeRange]) -> dict[str, tuple[int, int]]:
    """Smallest and largest size of every dynamic dimension by name; one without a name is "input[axis]"."""
    ranges: dict[str, tuple[int, int]] = {}
    for tensor in inputs:
        smallest, _, largest = profile[tensor.name]
        for axis, dim in enumerate(tensor.dims):
            if isinstance(dim, str):
                ranges.setdefault(dim_name(tensor, axis), (smallest[axis], largest[axis]))
    return ranges


def dim_name(tensor: TensorInfo, axis: int) -> str:
    dim = tensor.dims[axis]
    return f"{tensor.name}[{axis}]" if dim == "?" else str(dim)


class Profiles:
    """The sizes that an engine accepts, by the names of its dynamic dimensions."""

    def __init__(self, info: EngineInfo) -> None:
        self._inputs = info.inputs
        self._ranges = [dim_ranges(info.inputs, profile) for profile in info.profiles]

    def index(self, sizes: Mapping[str, int]) -> int | None:
        """The first profile that covers these sizes; None if none does."""
        for index, ranges in enumerate(self._ranges):
            if all(low <= sizes[dim] <= high for dim, (low, high) in ranges.items()):
                return index
        return None

    def covering(self, shapes: Shapes) -> int:
        """The first profile that covers the shapes of all inputs. Raises UserError if none does."""
        shape_of = dict(shapes)
        given = {
            dim_name(tensor, axis): shape_of[tensor.name][axis]
            for tensor in self._inputs
            for axis, dim in enumerate(tensor.dims)
            if isinstance(dim, str)
        }
        found = self.index(given)
        if found is not None:
            return found
        sizes = ", ".join(f"{dim} {size}" for dim, size in given.items())
        profiles = "; or ".join(
            ", ".join(f"{dim} {low} to {high}" for dim, (low, high) in ranges.items()) for ranges in self._ranges
        )
        flag = ",".join(f"{dim}=1:{size}:{size}" for dim, size in given.items())
        raise UserError(
            f"the inputs have {sizes}; this engine was built for {profiles}: build it again with a profile that covers "
            f"them, such as --profile {flag}"
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
