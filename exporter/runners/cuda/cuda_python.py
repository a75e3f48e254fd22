"""CUDA through cuda-python, NVIDIA's own bindings of the CUDA runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from effexport.runners.cuda.device import CudaError, DeviceMemory, PinnedMemory


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
