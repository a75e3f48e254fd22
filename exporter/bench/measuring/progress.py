"""Progress of a benchmark and the time left, from rough costs that the run itself corrects."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from effexport.bench.grid import logits_bytes, products_of_case
from effexport.bench.measuring.floor import traffic_bytes
from effexport.bench.measuring.timing import FEWEST_ROUNDS, SHORT_RUNS, WAKE_UP_BELOW_SECONDS, WARM_UP_RUNS
from effexport.bench.results import Case
from effexport.environment import usable_cores
from effexport.runtimes import RUNTIMES, TORCH_OF_DEVICE

# Roughly a current processor. The run corrects the time left; the time announced before it may be off by half.
FLOPS_PER_CORE, BYTES_PER_SECOND = 5e10, 5e9
# How often a call reads or writes its inputs and outputs, and how often a plain formula its logits.
PASSES_OF_INPUTS, PASSES_OF_LOGITS = 4, 12
# Importing PyTorch; exporting a model; loading and comparing a case; a child process.
START_SECONDS, EXPORT_SECONDS, LOAD_SECONDS, CHILD_SECONDS = 3.0, 2.5, 0.7, 1.5
# Calls of PyTorch for the reference of a case, and calls in the child process.
REFERENCE_CALLS, CHILD_CALLS = 2, 2
# The floors take turns with the candidates and about as long; between turns, threads stop spinning.
TIMES_WITH_FLOORS, PAUSES_SECONDS = 2.0, 0.06


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
    is_plain = RUNTIMES[case.runtime].graph != "ours"
    moved = PASSES_OF_INPUTS * traffic_bytes(case) + is_plain * PASSES_OF_LOGITS * logits_bytes(case)
    return flops / (FLOPS_PER_CORE * usable_cores()) + moved / BYTES_PER_SECOND + 1e-3


def prepare_cost(case: Case, parity: bool = True) -> float:
    """Loading, and comparing with PyTorch unless that is left out."""
    reference = replace(case, runtime=TORCH_OF_DEVICE["cpu"])
    return LOAD_SECONDS + parity * REFERENCE_CALLS * call_seconds(reference)


def timing_cost(case: Case, rounds: int, max_seconds: float) -> float:
    """Warming up and taking turns with the floors of the model."""
    call = call_seconds(case)
    is_short = call < WAKE_UP_BELOW_SECONDS
    timed = max(min(max_seconds, rounds * call * (SHORT_RUNS if is_short else 1)), min(rounds, FEWEST_ROUNDS) * call)
    waking = timed / SHORT_RUNS if is_short else 0.0
    return TIMES_WITH_FLOORS * (WARM_UP_RUNS * call + timed + waking) + rounds * PAUSES_SECONDS


def memory_cost(case: Case) -> float:
    return CHILD_SECONDS + CHILD_CALLS * call_seconds(case)
