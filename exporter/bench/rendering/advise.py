"""Which variant on which runtime is fastest here, under a memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from effexport.bench.rendering.curves import median_ms
from effexport.bench.results import BenchResults, Row
from effexport.units import duration, memory

OTHER_MODELS = (
    "The variants are different models, not implementations of one model: they cannot share weights, so this "
    "is a choice to make before training."
)


@dataclass(frozen=True)
class Advice:
    """Measured rows in order of speed.

    ranked: within the memory limit, fastest first. beyond: over the limit, or of unknown memory.
    """

    ranked: tuple[Row, ...]
    beyond: tuple[Row, ...]
    limit_bytes: int | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """The advice, what it saves compared with softmax if that was measured, and its caveats."""
        limit = "" if self.limit_bytes is None else f" within {memory(self.limit_bytes)}"
        if not self.ranked:
            return (f"No measured candidate runs{limit}.",)
        best = self.ranked[0]
        assert best.timing is not None
        case = best.case
        peak = "" if best.peak_bytes is None else f" and {memory(best.peak_bytes)}"
        size = f"{case.batch} × {case.seq_len} tokens"
        first = f"Fastest{limit} for {size}: {case.label} on {case.runtime}, {duration(best.timing.median_ms)}{peak}."
        return (first, *self.same_model(best), OTHER_MODELS)

    def same_model(self, best: Row) -> tuple[str, ...]:
        """The fastest runtime of softmax, for users who have already trained a softmax model."""
        softmax = next((row for row in self.ranked if row.case.variant == "softmax"), None)
        if softmax is None or softmax is best or softmax.timing is None:
            return ()
        return (f"Fastest for softmax itself: {softmax.case.runtime}, {duration(softmax.timing.median_ms)}.",)


def advice_from_results(results: BenchResults, limit_bytes: int | None = None) -> Advice:
    """Rank the rows of all sizes; a run with --advise has one size."""
    measured = sorted((row for row in results.rows if row.is_quotable), key=lambda row: median_ms(row) or 0.0)
    if limit_bytes is None:
        return Advice(tuple(measured), (), None)
    fits = [row for row in measured if row.peak_bytes is not None and row.peak_bytes <= limit_bytes]
    return Advice(tuple(fits), tuple(row for row in measured if row not in fits), limit_bytes)
