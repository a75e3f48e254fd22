"""The memory of a runner's inputs and outputs, on the GPU and pinned on the host, and the profile that covers a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import TensorInfo, numpy_dtype
from effexport.errors import EffexportError, UserError
from effexport.models.size_formula import shape_of
from effexport.models.validation import SpecError
from effexport.tensorrt.cuda import Cuda, CudaError, DeviceMemory, PinnedMemory

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.tensorrt.context import Shapes
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
        """Let two tensors exchange their memory."""
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
        device = self._buffers[name].device
        assert device is not None, "reserve comes first"
        return device.address

    def write(self, name: str, array: Array) -> None:
        """Queue a copy of an array to the device. The array may be changed as soon as this returns."""
        buffer = self._buffers[name]
        assert buffer.device is not None, "reserve comes first"
        assert buffer.pinned is not None, "reserve comes first"
        np.copyto(self._view(buffer.pinned, name, array.shape), array, casting="no")
        self._cuda.copy_to_device(buffer.device, buffer.pinned, array.nbytes)

    def fetch(self, name: str, shape: Shape) -> None:
        """Queue a copy of a tensor to the host. `read` returns it after the next `synchronize`."""
        buffer = self._buffers[name]
        assert buffer.device is not None, "reserve comes first"
        assert buffer.pinned is not None, "reserve comes first"
        self._cuda.copy_to_host(buffer.pinned, buffer.device, nbytes_of(shape, self._dtypes[name]))

    def read(self, name: str, shape: Shape) -> Array:
        """A copy of what `fetch` copied to the host, where the next run overwrites it."""
        pinned = self._buffers[name].pinned
        assert pinned is not None, "reserve comes first"
        return self._view(pinned, name, shape).copy()

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
