"""CUDA through PyTorch, if that is already loaded: its memory pool, streams and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from effexport.runners.cuda.device import CudaError, DeviceMemory, PinnedMemory


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
