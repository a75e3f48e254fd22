"""Memory leaks: a line through the memory in use over the runs of an engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SAMPLE_EVERY = 100
# the driver maps memory in pieces of this size, so cudaMemGetInfo changes in such steps
GRANULE_BYTES = 2 << 20


@dataclass(frozen=True)
class MemoryFit:
    """A line fitted to the memory in use over the runs, without the first third of them.

    limit_bytes_per_run: the slope that a single step of GRANULE_BYTES, which any late allocation makes, can cause: 3/2
    of the step over the range. More runs lower this limit, but not the slope of a real leak.
    standard_error: that of the slope. A slope below three standard errors is not significant.
    """

    bytes_per_run: float
    standard_error: float
    limit_bytes_per_run: float

    @property
    def visible_bytes_per_run(self) -> float:
        """The smallest growth that this fit can distinguish from none."""
        return max(self.limit_bytes_per_run, 3 * self.standard_error)

    @property
    def problem(self) -> str:
        # `max` may drop NaN, and every comparison with NaN is false
        if math.isnan(self.bytes_per_run) or math.isnan(self.standard_error):
            return f"the fit is not a number: {self}"
        if self.bytes_per_run > self.visible_bytes_per_run:
            return f"memory grows by {self.bytes_per_run:.0f} bytes per run, at most {self.visible_bytes_per_run:.0f}"
        if self.visible_bytes_per_run > 16 * self.limit_bytes_per_run:
            return (
                f"memory varies so much that growth below {self.visible_bytes_per_run:.0f} bytes per run would not "
                "show; run longer, or alone on the GPU"
            )
        return ""


def fit_memory(samples: Sequence[tuple[int, int]]) -> MemoryFit:
    """Fit a line to samples of (runs so far, bytes in use), evenly spaced. Raises ValueError for too few."""
    settled = samples[math.ceil(len(samples) / 3) :]
    if len(settled) < 4:
        raise ValueError(f"{len(samples)} samples are too few for a line; run at least {6 * SAMPLE_EVERY} times")
    runs, used = [run for run, _ in settled], [used for _, used in settled]
    slope, intercept = statistics.linear_regression(runs, used)
    residual = sum((y - intercept - slope * x) ** 2 for x, y in settled)
    mean = statistics.fmean(runs)
    spread = sum((x - mean) ** 2 for x in runs)
    error = math.sqrt(residual / (len(settled) - 2) / spread)
    return MemoryFit(slope, error, 1.5 * GRANULE_BYTES / (runs[-1] - runs[0]))
