"""The candidates of an advice, as its table shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from effexport.bench.results import Row
from effexport.report.rendering.text import interval_text
from effexport.units import NOTHING, duration, duration_with, listed, memory

if TYPE_CHECKING:
    from effexport.bench.quality import CandidateQuality

Standing = Literal[
    "use this",
    "frontier",
    "fits",
    "–",
    "memory unknown",
    "disturbed",
    "over the limit",
    "not measured",
    "failed",
    "not reached",
]
# The order of the table. Without any limit, "–" stands for "fits". "frontier" fits too: with --quality, no other one
# that fits is both faster and better.
STANDINGS: tuple[Standing, ...] = get_args(Standing)
FITTING: tuple[Standing, ...] = ("use this", "frontier", "fits", "–")


@dataclass(frozen=True)
class Entry:
    """One candidate of an advice. row: its measurement at the full length, or None. why: its standing in words.

    quality: None if it was not judged.
    """

    label: str
    runtime: str
    standing: Standing
    why: str = ""
    row: Row | None = None
    quality: CandidateQuality | None = None

    @property
    def name(self) -> str:
        return f"{self.label} on {self.runtime}"

    @property
    def latency_ms(self) -> float | None:
        return None if self.row is None or self.row.timing is None else self.row.timing.median_ms

    @property
    def latency(self) -> str:
        """`12.3 ± 0.42 ms`: the median and its spread."""
        if self.row is None or self.row.timing is None:
            return NOTHING
        return duration_with(self.row.timing.median_ms, self.row.timing.spread_ms)

    @property
    def peak_bytes(self) -> int | None:
        return None if self.row is None else self.row.peak_bytes

    @property
    def loss(self) -> str:
        """`2.1034 (2.0812 to 2.1256)`: with its 95 % confidence interval."""
        return NOTHING if self.quality is None else interval_text(self.quality.loss)

    @property
    def is_disturbed(self) -> bool:
        """Whether its timing is too long because of other programs."""
        return self.latency_ms is not None and self.row is not None and not self.row.is_quotable

    @property
    def figures(self) -> str:
        """`182 ms and 392 MB`, as far as they are known."""
        return listed([duration(self.latency_ms)] + ([] if self.peak_bytes is None else [memory(self.peak_bytes)]))
