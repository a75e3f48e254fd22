"""The interface of CUDA that running an engine needs: memory, one stream, copies and graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from effexport.errors import EffexportError

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
