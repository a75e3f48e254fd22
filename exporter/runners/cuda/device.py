"""What running an engine needs of CUDA: memory, one stream, copies and graphs, from cuda-python or from PyTorch."""

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
    """CUDA refused a call, or a kernel before it failed. The message has CUDA's own name for it."""


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """Memory of the GPU, aligned to 256 bytes. owner: what a library wants to have back."""

    address: int
    nbytes: int
    owner: Any = None


@dataclass(frozen=True, eq=False)
class PinnedMemory:
    """Host memory that the GPU copies from and to by itself, as bytes of numpy."""

    array: npt.NDArray[np.uint8]
    address: int
    owner: Any = None


class Cuda(Protocol):
    """One device and one stream of it. Work is queued on the stream, and done when `synchronize` returns.

    Not thread-safe: who shares one holds a lock. Every method is called inside `selected`, which makes the device the
    calling thread's and gives the thread its own device back. Every method raises CudaError.

    stream_handle: as TensorRT takes it. compute_capability: of the device, such as 90.
    """

    @property
    def stream_handle(self) -> int: ...

    @property
    def compute_capability(self) -> int: ...

    def selected(self) -> AbstractContextManager[None]: ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total memory of the device, in bytes."""
        ...

    def allocate(self, nbytes: int) -> DeviceMemory: ...

    def free(self, memory: DeviceMemory) -> None: ...

    def allocate_pinned(self, nbytes: int) -> PinnedMemory: ...

    def free_pinned(self, memory: PinnedMemory) -> None: ...

    def copy_to_device(self, destination: DeviceMemory, source: PinnedMemory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes`."""
        ...

    def copy_to_host(self, destination: PinnedMemory, source: DeviceMemory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes`."""
        ...

    def synchronize(self) -> None:
        """Wait for all that is queued. Raises CudaError for what failed meanwhile."""
        ...

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` queues on the stream, none of which is done. What `work` raises passes through."""
        ...

    def launch(self, graph: Any) -> None:
        """Queue all of a graph."""
        ...

    def destroy(self, graph: Any) -> None: ...

    def close(self) -> None:
        """Give the stream back. Memory and graphs are freed by who made them, before."""
        ...
