"""Interleaved timing: every round runs each contender once, A B C A B C …, so that what slows the machine for a while
slows all of them, and ratios are taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from effexport.bench.results import Timing

WARM_UP_RUNS = 2
# Thread pools spin for a while after a run, and would take cores from the next one.
PAUSE_SECONDS = 0.02
# A longer run wakes its threads and fills its caches at no cost worth mentioning; shorter ones first run untimed.
WAKE_UP_BELOW_SECONDS = 0.2
# Runs in a row of which a short contender's turn is the median.
SHORT_RUNS = 3
# What takes this long is warm after one run.
LONG_SECONDS = 1.0
# Below this many rounds a median says little, so the time budget does not end a row before.
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Contender:
    """Something to time. run: one call. pool: whose threads run it; those of one pool do not disturb each other."""

    name: str
    run: Callable[[], object]
    pool: str


@dataclass
class Rotation:
    """Contenders that take turns. samples: per contender, seconds by round. failures: what contenders raised.

    max_seconds: of timed runs of one contender, after which it takes no more turns. clock, sleep: for tests.
    After an interrupt, samples hold what was measured by then.
    """

    contenders: Sequence[Contender]
    rounds: int
    max_seconds: float
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep
    samples: dict[str, dict[int, float]] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    _pool: str = ""

    def run(self, on_round: Callable[[int], None] = lambda number: None) -> None:
        """Warm up, then all rounds. on_round hears how many are done."""
        lengths = {contender.name: self.warmed_up(contender) for contender in self.contenders}
        self.samples.update({contender.name: {} for contender in self.contenders})
        for number in range(self.rounds):
            active = [contender for contender in self.contenders if self.wants_more(contender.name)]
            if not active:
                break
            for contender in active:
                self.turn(contender, number, wake_up=lengths[contender.name] < WAKE_UP_BELOW_SECONDS)
            on_round(number + 1)

    def wants_more(self, name: str) -> bool:
        own = self.samples[name]
        return name not in self.failures and (len(own) < FEWEST_ROUNDS or sum(own.values()) < self.max_seconds)

    def warmed_up(self, contender: Contender) -> float:
        """Run it until its caches, pools and compilers are ready; returns the seconds of the last run."""
        seconds = 0.0
        for _ in range(WARM_UP_RUNS):
            seconds = self.guarded(contender)
            if seconds > LONG_SECONDS:
                break
        return seconds

    def turn(self, contender: Contender, number: int, *, wake_up: bool) -> None:
        if contender.pool != self._pool:
            self.sleep(PAUSE_SECONDS)
            self._pool = contender.pool
        if wake_up:
            self.guarded(contender)
        # a short run that another pool's last spin delays by a slice of the scheduler would be nothing but that slice
        seconds = statistics.median(self.guarded(contender) for _ in range(SHORT_RUNS if wake_up else 1))
        if contender.name not in self.failures:
            self.samples[contender.name][number] = seconds

    def guarded(self, contender: Contender) -> float:
        """Seconds of one call. A contender that raises takes no more turns, and the others go on."""
        if contender.name in self.failures:
            return 0.0
        start = self.clock()
        try:
            contender.run()
        except Exception as error:  # runtimes have no common base class for their errors
            self.failures[contender.name] = error
        return self.clock() - start

    def median_ms(self, name: str) -> float | None:
        """None where nothing was measured."""
        own = self.samples.get(name)
        return statistics.median(own.values()) * 1e3 if own else None


def timing_from_samples(seconds: Sequence[float]) -> Timing:
    """Of at least one run."""
    ms = sorted(value * 1e3 for value in seconds)
    quartiles = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [ms[0]] * 3
    return Timing(
        runs=len(ms),
        median_ms=statistics.median(ms),
        mean_ms=statistics.fmean(ms),
        deviation_ms=statistics.stdev(ms) if len(ms) > 1 else 0.0,
        lowest_ms=ms[0],
        highest_ms=ms[-1],
        spread_ms=(quartiles[2] - quartiles[0]) / 2,
    )


def times_faster(own: dict[int, float], other: dict[int, float]) -> float | None:
    """How many times faster than the other: the median over rounds that both took part in; None without any."""
    ratios = [other[number] / seconds for number, seconds in own.items() if number in other and seconds > 0]
    return statistics.median(ratios) if ratios else None
