"""GPU memory, one stream, copies and graphs: what effexport itself asks of CUDA, by PyTorch or cuda-python."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.base.errors import EffexportError, MissingExtraError, UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from effexport.base.dtypes import Array


Shape = tuple[int, ...]


class CudaError(EffexportError):
    """A call to CUDA failed, or a kernel before it. The message has CUDA's name of the error."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory of the GPU, aligned to 256 bytes. owner: the object that holds it, if a library needs one."""

    address: int
    nbytes: int
    owner: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PinnedMemory(Memory):
    """Page-locked host memory, which the GPU copies from and to by itself. array: its bytes."""

    array: npt.NDArray[np.uint8]


class CudaPython:
    """One device and one stream on it, through cuda.bindings.runtime, whose functions return a status first.

    Work is queued on the stream, and done when `synchronize` returns. Not thread-safe: threads that share one must hold
    a lock. Call methods inside `selected`. Every method raises CudaError.

    stream_handle: the stream as TensorRT expects it. compute_capability: that of the device, such as 90.
    """

    def __init__(self, runtime: Any) -> None:
        """Use the current device of this thread, with a new stream. Raises CudaError."""
        self._runtime = runtime
        self._device: int = self._checked(runtime.cudaGetDevice())
        attributes = runtime.cudaDeviceAttr
        major, minor = (
            self._checked(runtime.cudaDeviceGetAttribute(attribute, self._device))
            for attribute in (
                attributes.cudaDevAttrComputeCapabilityMajor,
                attributes.cudaDevAttrComputeCapabilityMinor,
            )
        )
        self.compute_capability: int = 10 * major + minor
        # the default stream waits for the whole device, and TensorRT warns about it
        self._stream: Any = self._checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))

    @property
    def stream_handle(self) -> int:
        return int(self._stream)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Make the device the current one of the thread, and restore the previous one afterwards."""
        before = self._checked(self._runtime.cudaGetDevice())
        if before == self._device:
            yield
            return
        self._checked(self._runtime.cudaSetDevice(self._device))
        try:
            yield
        finally:
            self._checked(self._runtime.cudaSetDevice(before))

    def memory_info(self) -> tuple[int, int]:
        """Free and total memory of the device, in bytes."""
        free, total = self._checked(self._runtime.cudaMemGetInfo())
        return int(free), int(total)

    def allocate(self, nbytes: int) -> Memory:
        return Memory(int(self._checked(self._runtime.cudaMalloc(nbytes))), nbytes)

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        address = int(self._checked(self._runtime.cudaMallocHost(nbytes)))
        return PinnedMemory(address, nbytes, array=bytes_at(address, nbytes))

    def free(self, memory: Memory) -> None:
        runtime = self._runtime
        free = runtime.cudaFreeHost if isinstance(memory, PinnedMemory) else runtime.cudaFree
        self._checked(free(memory.address))

    def copy(self, destination: Memory, source: Memory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes`, from or to the GPU."""
        # CUDA knows from the addresses which of the two is on the GPU
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._checked(self._runtime.cudaMemcpyAsync(destination.address, source.address, nbytes, kind, self._stream))

    def synchronize(self) -> None:
        """Wait for all queued work. Raises CudaError if some of it failed."""
        self._checked(self._runtime.cudaStreamSynchronize(self._stream))

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` queues on the stream, without running it. Exceptions of `work` pass through."""
        runtime = self._runtime
        # other threads may allocate meanwhile, which would end the capture in the default mode
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._checked(runtime.cudaStreamBeginCapture(self._stream, mode))
        try:
            work()
        except BaseException:
            # the stream cannot be used until its capture has ended, even if that fails
            with suppress(CudaError):
                self._checked(runtime.cudaGraphDestroy(self._checked(runtime.cudaStreamEndCapture(self._stream))))
            raise
        graph = self._checked(runtime.cudaStreamEndCapture(self._stream))
        try:
            return self._checked(runtime.cudaGraphInstantiate(graph, 0))
        finally:
            self._checked(runtime.cudaGraphDestroy(graph))

    def launch(self, graph: Any) -> None:
        """Queue the work of a graph."""
        self._checked(self._runtime.cudaGraphLaunch(graph, self._stream))

    def destroy(self, graph: Any) -> None:
        self._checked(self._runtime.cudaGraphExecDestroy(graph))

    def close(self) -> None:
        """Destroy the stream. Memory and graphs must be freed before."""
        self._checked(self._runtime.cudaStreamDestroy(self._stream))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        """The values that a call returned, if any. Raises CudaError unless it succeeded."""
        runtime = self._runtime
        status, *values = result
        if status != runtime.cudaError_t.cudaSuccess:
            _, name = runtime.cudaGetErrorName(status)
            _, text = runtime.cudaGetErrorString(status)
            runtime.cudaGetLastError()  # otherwise the next caller of it would get this error
            raise CudaError(f"CUDA reports {name.decode()}: {text.decode()}")
        return values[0] if len(values) == 1 else tuple(values)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of the host itself, as an array."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


class CudaTorch:
    """As CudaPython, through the module torch, which must have a GPU."""

    def __init__(self, torch: Any) -> None:
        """Use the current device of this thread, with a new stream. Raises CudaError."""
        self._torch = torch
        self._device: int = _checked(torch.cuda.current_device)
        major, minor = _checked(torch.cuda.get_device_capability, self._device)
        self.compute_capability: int = 10 * major + minor
        self._stream: Any = _checked(torch.cuda.Stream, self._device)

    @property
    def stream_handle(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def selected(self) -> Iterator[None]:
        # also makes the device of the stream the current one, and restores both
        with self._torch.cuda.stream(self._stream):
            yield

    def memory_info(self) -> tuple[int, int]:
        free, total = _checked(self._torch.cuda.mem_get_info, self._device)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> Memory:
        torch = self._torch
        tensor = _checked(torch.empty, nbytes, dtype=torch.uint8, device=f"cuda:{self._device}")
        return Memory(tensor.data_ptr(), nbytes, tensor)

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        tensor = _checked(self._torch.empty, nbytes, dtype=self._torch.uint8, pin_memory=True)
        return PinnedMemory(tensor.data_ptr(), nbytes, tensor, array=tensor.numpy())

    def free(self, memory: Memory) -> None:
        """Frees memory of the GPU; PyTorch frees pinned memory with the last reference to it."""
        if not isinstance(memory, PinnedMemory):
            _checked(memory.owner.untyped_storage().resize_, 0)

    def copy(self, destination: Memory, source: Memory, nbytes: int) -> None:
        _checked(destination.owner[:nbytes].copy_, source.owner[:nbytes], non_blocking=True)

    def synchronize(self) -> None:
        _checked(self._stream.synchronize)

    def capture(self, work: Callable[[], None]) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile, which would end the capture in the default mode
        _checked(graph.capture_begin, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            # the stream cannot be used until its capture has ended, even if that fails
            with suppress(RuntimeError):
                graph.capture_end()
                graph.reset()
            raise
        _checked(graph.capture_end)
        return graph

    def launch(self, graph: Any) -> None:
        _checked(graph.replay)

    def destroy(self, graph: Any) -> None:
        _checked(graph.reset)

    def close(self) -> None:
        """Does nothing: PyTorch keeps its streams in a pool."""


def _checked(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call PyTorch, which reports every failure of CUDA as a RuntimeError; raises CudaError with its first line."""
    try:
        return call(*arguments, **options)
    except RuntimeError as error:
        first_line, *_ = str(error).split("\n")
        raise CudaError(f"CUDA reports through PyTorch: {first_line}") from error


Cuda = CudaPython | CudaTorch
NEEDS = "running an engine needs an NVIDIA GPU and its driver; building trt-rtx engines does not"


def open_cuda(extra: str) -> Cuda:
    """The current device of this thread: through PyTorch if it is loaded and has a GPU, else through cuda-python.

    extra: the optional part of effexport that installs cuda-python: "tensorrt" or "rtx".
    Raises MissingExtraError without cuda-python, and UserError without a driver or a GPU.
    """
    torch: Any = sys.modules.get("torch")
    # programs with tensors on the GPU then share PyTorch's memory pool
    if torch is not None and torch.cuda.is_available():
        return CudaTorch(torch)
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingExtraError("cuda-bindings", extra, remark=NEEDS) from error
    # anything but success means that nothing can run: there is no driver, an old one, or no device
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess or not count:
        name = getattr(status, "name", status)
        raise UserError(f"CUDA finds no GPU that it can use ({name}); {NEEDS}")
    return CudaPython(runtime)


def current_compute_capability(extra: str) -> int:
    """The compute capability of the device that `open_cuda` opens, such as 90. Raises as `open_cuda` does."""
    cuda = open_cuda(extra)
    with cuda.selected():
        try:
            return cuda.compute_capability
        finally:
            cuda.close()


# A runner allocates for the largest shapes of its profiles at once if they need no more than this. Otherwise memory
# grows with the runs: a profile up to 65536 tokens does not mean that such runs happen.
EAGER_BYTES = 256 * 2**20


class Buffers:
    """Memory of tensors, on the GPU and as much on the host, which grows with the largest run and never shrinks.

    The caller holds the lock of `cuda`.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._maxima: dict[str, int] = {}
        self._dtypes: dict[str, np.dtype[np.generic]] = {}
        self._device: dict[str, Memory] = {}
        self._pinned: dict[str, PinnedMemory] = {}

    def add(self, tensors: Sequence[TensorInfo], largest: Mapping[str, Shape]) -> None:
        """Tensors to keep memory for. One that is known already, from another engine, keeps its memory.

        largest: per tensor, its largest shape, if known: memory grows by doubling up to its size.
        """
        self._dtypes |= {tensor.name: numpy_dtype(tensor.dtype) for tensor in tensors}
        for name, shape in largest.items():
            self._maxima[name] = max(self._nbytes(name, shape), self._maxima.get(name, 0))

    def nbytes_of(self, shapes: Mapping[str, Shape]) -> int:
        """The bytes of all these tensors."""
        return sum(self._nbytes(name, shape) for name, shape in shapes.items())

    def _nbytes(self, name: str, shape: Shape) -> int:
        return math.prod(shape) * self._dtypes[name].itemsize

    def swap(self, first: str, second: str) -> None:
        """Let two tensors exchange their memory, before the next run is prepared."""
        device, pinned = self._device, self._pinned
        device[first], device[second] = device[second], device[first]
        pinned[first], pinned[second] = pinned[second], pinned[first]

    def reserve(self, shapes: Mapping[str, Shape]) -> None:
        """Allocate for these shapes. Tensors that grow get a new address and lose their contents.

        Raises EffexportError if memory runs out; other tensors keep theirs.
        """
        for name, shape in shapes.items():
            needed = self._nbytes(name, shape)
            present = self._pinned[name].nbytes if name in self._pinned else 0
            if needed > present:
                self._replace(name, max(needed, min(2 * present, self._maxima.get(name, needed))))

    def _replace(self, name: str, nbytes: int) -> None:
        cuda = self._cuda
        self._free(name)
        try:
            self._device[name] = cuda.allocate(nbytes)
            self._pinned[name] = cuda.allocate_pinned(nbytes)
        except CudaError as error:
            free, total = cuda.memory_info()
            raise EffexportError(
                f"{name!r} needs {nbytes:,} bytes on the GPU and as many pinned on the host, which are not available "
                f"({error}; the GPU has {free:,} bytes free of {total:,}); run smaller batches, or free memory"
            ) from error

    def address(self, name: str) -> int:
        return self._device[name].address

    def write(self, name: str, array: Array) -> None:
        """Queue a copy of an array to the device. The array may be changed as soon as this returns."""
        np.copyto(self._on_host(name, array.shape), array, casting="no")
        self._cuda.copy(self._device[name], self._pinned[name], array.nbytes)

    def fetch(self, name: str, shape: Shape) -> None:
        """Queue a copy of a tensor to the host. `read` returns it after the next `synchronize`."""
        self._cuda.copy(self._pinned[name], self._device[name], self._nbytes(name, shape))

    def read(self, name: str, shape: Shape) -> Array:
        """A copy of what `fetch` copied to the host, where the next run overwrites it."""
        return self._on_host(name, shape).copy()

    def _on_host(self, name: str, shape: Shape) -> Array:
        return self._pinned[name].array[: self._nbytes(name, shape)].view(self._dtypes[name]).reshape(shape)

    def _free(self, name: str) -> None:
        for held in (self._device, self._pinned):
            if name in held:
                self._cuda.free(held.pop(name))

    def close(self) -> None:
        for name in list(self._device):
            self._free(name)
