"""What a user can afford, as limits of an advice."""

from __future__ import annotations

from dataclasses import dataclass

from effexport.units import duration, listed, memory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a call may take, in milliseconds and in bytes; None for no limit."""

    latency_ms: float | None = None
    memory_bytes: int | None = None

    @property
    def text(self) -> str:
        """`200 ms and 1.00 GB`; "" without limits."""
        latency = [] if self.latency_ms is None else [duration(self.latency_ms)]
        return listed(latency + ([] if self.memory_bytes is None else [memory(self.memory_bytes)]))
