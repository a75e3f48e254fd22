"""Progress of a benchmark and the time left, from rough costs that the run itself corrects."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from effexport.bench.grid import logits_bytes, products_of_case
from effexport.bench.results import Case

# Roughly a current processor; only the ratio of one case to another matters.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 5e10, 5e9
# Exporting, loading and comparing a case; and a child process.
PREPARE_SECONDS, CHILD_SECONDS = 5.0, 4.0


@dataclass(frozen=True)
class Step:
    """A progress message. text: what happens now. share: how much is done, 0 to 1. seconds_left: None if unknown."""

    text: str
    share: float
    seconds_left: float | None


OnStep = Callable[[Step], None]


class Pace:
    """A running total of the work done, which estimates how long the rest will take."""

    def __init__(self, total: float, on_step: OnStep, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = max(total, 1e-9)
        self._done = 0.0
        self._on_step = on_step
        self._clock = clock
        self._start = clock()

    def say(self, text: str) -> None:
        share = min(1.0, self._done / self._total)
        elapsed = self._clock() - self._start
        self._on_step(Step(text, share, elapsed * (1 - share) / share if share > 0.02 else None))

    def pay(self, cost: float) -> None:
        self._done += cost


def call_seconds(case: Case) -> float:
    """Roughly how long one call takes."""
    flops = sum(product.flops for product in products_of_case(case))
    return flops / FLOPS_PER_SECOND + 6 * logits_bytes(case) / BYTES_PER_SECOND + 1e-3


def timing_cost(case: Case, rounds: int, max_seconds: float) -> float:
    return min(max_seconds, rounds * call_seconds(case)) + rounds * 0.03
