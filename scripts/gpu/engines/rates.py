"""What this GPU does at most: the rates of a large product and a large copy."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

DEVICE = "cuda:0"
# size of the square matrices whose product measures this GPU's arithmetic
PRODUCT_SIZE = 8192
COPY_BYTES = 1 << 30
ROUNDS = 31
CALLS_PER_ROUND = 10


@functools.cache
def product_rate(dtype_name: str) -> float:
    """Floating-point operations per second of a large product, by PyTorch on this GPU."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (PRODUCT_SIZE, PRODUCT_SIZE)
    dtype = getattr(torch, dtype_name)
    a, b = (torch.randn(size, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    (time_us,) = interleaved_medians([lambda: torch.mm(a, b, out=product)])
    return 2 * PRODUCT_SIZE**3 / (time_us * 1e-6)


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    import torch

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    destination = torch.empty_like(source)
    (time_us,) = interleaved_medians([lambda: destination.copy_(source)])
    return 2 * COPY_BYTES / (time_us * 1e-6)


def floor_us(operations: float, moved_bytes: float, peak: float, bandwidth: float) -> tuple[float, str]:
    """The lower bound in microseconds, and what determines it: "arithmetic" or "memory"."""
    arithmetic, memory = 1e6 * operations / peak, 1e6 * moved_bytes / bandwidth
    return (arithmetic, "arithmetic") if arithmetic > memory else (memory, "memory")


def interleaved_medians(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median time of each call in microseconds. They take turns, so that a changing clock affects all."""
    import torch

    samples: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS + 2):
        for call, times in zip(calls, samples, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS_PER_ROUND):
                call()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first turns warm up
                times.append(1e3 * begin.elapsed_time(end) / CALLS_PER_ROUND)
    return [statistics.median(times) for times in samples]
