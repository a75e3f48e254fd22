"""The least time that a call can take: what its kernels do, as they are written, over what a GPU can do at best."""

from __future__ import annotations

from dataclasses import dataclass

from effexport.plugins.contract import ACCESS_BYTES, Work

# Multiply-adds of float32 per multiprocessor and clock, on SM 86 and later except SM 87; others have fewer.
FUSED_PER_CLOCK = 128


@dataclass(frozen=True)
class Rates:
    """The best rates of a GPU, per second.

    copied: bytes of a copy, read and written. tensor, fused: multiply-adds, on tensor cores and of float32. shared:
    bytes of all multiprocessors' shared memory. cache_bytes: the size of the L2 cache.
    """

    copied: float
    tensor: float
    fused: float
    shared: float
    cache_bytes: float

    @staticmethod
    def of(copied: float, tensor: float, multiprocessors: int, clock_hz: float, cache_bytes: float) -> Rates:
        clocks = multiprocessors * clock_hz
        return Rates(copied, tensor, clocks * FUSED_PER_CLOCK, clocks * ACCESS_BYTES, cache_bytes)


@dataclass(frozen=True)
class Bound:
    """In microseconds, by resource. moved: bytes, all launches together, where the L2 cache keeps nothing."""

    by_resource: dict[str, float]
    moved: float

    @property
    def us(self) -> float:
        return max(self.by_resource.values())

    @property
    def resource(self) -> str:
        return max(self.by_resource, key=self.by_resource.__getitem__)


def bound_of(work: Work, in_and_out: int, rates: Rates) -> Bound:
    """in_and_out: bytes of all inputs and outputs."""
    from_memory = sum(max(0.0, read - rates.cache_bytes) for read in work.again)
    seconds = {
        "memory": (in_and_out + work.scratch + from_memory) / rates.copied,
        "tensor cores": work.tensor / rates.tensor,
        "multiply-adds": work.fused / rates.fused,
        "shared memory": work.shared / rates.shared,
    }
    return Bound({name: 1e6 * value for name, value in seconds.items()}, in_and_out + work.scratch + sum(work.again))
