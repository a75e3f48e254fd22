"""GPU memory, one stream, copies and graphs: all of CUDA that running an engine needs, by PyTorch or cuda-python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from effexport.base.errors import EffexportError, MissingExtraError, UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class CudaError(EffexportError):
    """A call to CUDA failed, or a kernel before it. The message has CUDA's name of the error."""


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """Memory of the GPU, aligned to 256 bytes. owner: the object that holds it, if a library needs one."""

    address: int
    nbytes: int
    owner: Any = None


@dataclass(frozen=True, eq=False)
class PinnedMemory:
    """Page-locked host memory, which the GPU copies from and to by itself, as bytes of numpy."""

    array: npt.NDArray[np.uint8]
    address: int
    owner: Any = None


class Cuda(Protocol):
    """One device and one stream on it. Work is queued on the stream, and done when `synchronize` returns.

    Not thread-safe: threads that share one must hold a lock. Call methods inside `selected`, which makes the device
    the current one of the thread, and restores the previous one afterwards. Every method raises CudaError.

    stream_handle: the stream as TensorRT expects it. compute_capability: that of the device, such as 90.
    """

    @property
    def stream_handle(self) -> int: ...

    @property
    def compute_capability(self) -> int: ...

    def selected(self) -> AbstractContextManager[None]: ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total memory of the device, in bytes."""

    def allocate(self, nbytes: int) -> DeviceMemory: ...

    def free(self, memory: DeviceMemory) -> None: ...

    def allocate_pinned(self, nbytes: int) -> PinnedMemory: ...

    def free_pinned(self, memory: PinnedMemory) -> None: ...

    def copy_to_device(self, destination: DeviceMemory, source: PinnedMemory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes`."""

    def copy_to_host(self, destination: PinnedMemory, source: DeviceMemory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes`."""

    def synchronize(self) -> None:
        """Wait for all queued work. Raises CudaError if some of it failed."""

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` queues on the stream, without running it. Exceptions of `work` pass through."""

    def launch(self, graph: Any) -> None:
        """Queue the work of a graph."""

    def destroy(self, graph: Any) -> None: ...

    def close(self) -> None:
        """Destroy the stream. Memory and graphs must be freed before."""


class CudaPython:
    """The interface `Cuda` through cuda.bindings.runtime, whose functions return a status first."""

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
        runtime = self._runtime
        before = self._checked(runtime.cudaGetDevice())
        if before == self._device:
            yield
            return
        self._checked(runtime.cudaSetDevice(self._device))
        try:
            yield
        finally:
            self._checked(runtime.cudaSetDevice(before))

    def memory_info(self) -> tuple[int, int]:
        free, total = self._checked(self._runtime.cudaMemGetInfo())
        return int(free), int(total)

    def allocate(self, nbytes: int) -> DeviceMemory:
        return DeviceMemory(int(self._checked(self._runtime.cudaMalloc(nbytes))), nbytes)

    def free(self, memory: DeviceMemory) -> None:
        self._checked(self._runtime.cudaFree(memory.address))

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        address = int(self._checked(self._runtime.cudaMallocHost(nbytes)))
        return PinnedMemory(np.asarray(_Span(address, nbytes)), address)

    def free_pinned(self, memory: PinnedMemory) -> None:
        self._checked(self._runtime.cudaFreeHost(memory.address))

    def copy_to_device(self, destination: DeviceMemory, source: PinnedMemory, nbytes: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(destination.address, source.address, nbytes, kind)

    def copy_to_host(self, destination: PinnedMemory, source: DeviceMemory, nbytes: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(destination.address, source.address, nbytes, kind)

    def _copy(self, destination: int, source: int, nbytes: int, kind: Any) -> None:
        self._checked(self._runtime.cudaMemcpyAsync(destination, source, nbytes, kind, self._stream))

    def synchronize(self) -> None:
        self._checked(self._runtime.cudaStreamSynchronize(self._stream))

    def capture(self, work: Callable[[], None]) -> Any:
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
        self._checked(self._runtime.cudaGraphLaunch(graph, self._stream))

    def destroy(self, graph: Any) -> None:
        self._checked(self._runtime.cudaGraphExecDestroy(graph))

    def close(self) -> None:
        self._checked(self._runtime.cudaStreamDestroy(self._stream))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        """The values that a call returned, if any. Raises CudaError unless it succeeded."""
        runtime = self._runtime
        status, *values = result
        if status != runtime.cudaError_t.cudaSuccess:
            _, name = runtime.cudaGetErrorName(status)
            _, text = runtime.cudaGetErrorString(status)
            runtime.cudaGetLastError()  # otherwise the next caller of it would get this error
            raise CudaError(f"CUDA reports {_decoded(name)}: {_decoded(text)}")
        return values[0] if len(values) == 1 else tuple(values)


class _Span:
    """Bytes at an address, in numpy's interface for foreign memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _decoded(text: bytes | None) -> str:
    return text.decode() if text else "an error without a name"


class CudaTorch:
    """The interface `Cuda` through the module torch, which must have a GPU."""

    def __init__(self, torch: Any) -> None:
        """Use the current device of this thread, with a new stream. Raises CudaError."""
        self._torch = torch
        with _translated():
            self._device: int = torch.cuda.current_device()
            major, minor = torch.cuda.get_device_capability(self._device)
            self.compute_capability: int = 10 * major + minor
            self._stream: Any = torch.cuda.Stream(self._device)

    @property
    def stream_handle(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def selected(self) -> Iterator[None]:
        # also makes the device of the stream the current one, and restores both
        with self._torch.cuda.stream(self._stream):
            yield

    def memory_info(self) -> tuple[int, int]:
        with _translated():
            free, total = self._torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> DeviceMemory:
        torch = self._torch
        with _translated():
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self._device}")
        return DeviceMemory(tensor.data_ptr(), nbytes, tensor)

    def free(self, memory: DeviceMemory) -> None:
        with _translated():
            memory.owner.untyped_storage().resize_(0)

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        torch = self._torch
        with _translated():
            tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return PinnedMemory(tensor.numpy(), tensor.data_ptr(), tensor)

    def free_pinned(self, memory: PinnedMemory) -> None:
        """Does nothing: PyTorch frees the memory with the last reference to it."""

    def copy_to_device(self, destination: DeviceMemory, source: PinnedMemory, nbytes: int) -> None:
        with _translated():
            destination.owner[:nbytes].copy_(source.owner[:nbytes], non_blocking=True)

    def copy_to_host(self, destination: PinnedMemory, source: DeviceMemory, nbytes: int) -> None:
        with _translated():
            destination.owner[:nbytes].copy_(source.owner[:nbytes], non_blocking=True)

    def synchronize(self) -> None:
        with _translated():
            self._stream.synchronize()

    def capture(self, work: Callable[[], None]) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        with _translated():
            # other threads may allocate meanwhile, which would end the capture in the default mode
            graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            # the stream cannot be used until its capture has ended, even if that fails
            with suppress(RuntimeError):
                graph.capture_end()
                graph.reset()
            raise
        with _translated():
            graph.capture_end()
        return graph

    def launch(self, graph: Any) -> None:
        with _translated():
            graph.replay()

    def destroy(self, graph: Any) -> None:
        with _translated():
            graph.reset()

    def close(self) -> None:
        """Does nothing: PyTorch keeps its streams in a pool."""


@contextmanager
def _translated() -> Iterator[None]:
    """Turn RuntimeError, by which PyTorch reports every failure of CUDA, into CudaError with its first line."""
    try:
        yield
    except RuntimeError as error:
        first_line, *_ = str(error).split("\n")
        raise CudaError(f"CUDA reports through PyTorch: {first_line}") from error


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
