"""A queue, and a runner that takes what waits and fits into a batch: what `effexport serve` is, on paper."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Simulated:
    """latencies_s: from arrival to the end of the run. batches: rows of every run."""

    latencies_s: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    refused: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.end_s

    @property
    def mean_batch(self) -> float:
        return float(np.mean(self.batches))

    def percentile_ms(self, share: float) -> float:
        return float(np.percentile(self.latencies_s, 100 * share)) * 1e3


def simulate(
    arrivals_s: Sequence[float],
    run_s: Callable[[int], float],
    *,
    max_batch: int,
    queue_size: int,
    overhead_s: float = 0.0,
) -> Simulated:
    """Requests of one row and one length. run_s: duration of a run of so many rows, drawn anew each time.

    overhead_s: what a request costs beside its run, in which the runner is free for others.
    """
    result, waiting, arriving = Simulated(), deque[float](), deque(arrivals_s)
    free_s = 0.0
    while arriving or waiting:
        if not waiting:
            free_s = max(free_s, arriving[0])
        while arriving and arriving[0] <= free_s:
            arrived = arriving.popleft()
            if len(waiting) < queue_size:
                waiting.append(arrived)
            else:
                result.refused += 1
        rows = min(len(waiting), max_batch)
        duration = run_s(rows)
        free_s += duration
        result.busy_s += duration
        result.batches.append(rows)
        result.latencies_s += [free_s - waiting.popleft() + overhead_s for _ in range(rows)]
    result.end_s = free_s
    return result
