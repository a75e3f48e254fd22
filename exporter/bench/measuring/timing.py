"""Interleaved timing: every round runs each call once, A B C A B C …, so that a slow phase of the machine affects all
of them alike, and ratios are taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from effexport.bench.results import Timing

WARM_UP_RUNS = 2
# Thread pools spin for a while after a run, which would take cores from the next one.
PAUSE_SECONDS = 0.02
# A shorter run first runs untimed, to wake its threads and fill its caches; in a longer run, that does not matter.
WAKE_UP_BELOW_SECONDS = 0.2
# The turn of a short call is the median of this many runs in a row.
SHORT_RUNS = 3
# A call that takes this long is warm after one run.
LONG_SECONDS = 1.0
# A median of fewer rounds says little, so the time budget does not end a row earlier.
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class TimedCall:
    """A call to time. pool: the thread pool that runs it; calls of one pool do not disturb each other."""

    name: str
    run: Callable[[], object]
    pool: str


@dataclass
class Rotation:
    """Calls that take turns. samples: per call, seconds by round. failures: what calls raised.

    max_seconds: the timed seconds after which a call takes no more turns. clock, sleep: for tests.
    After an interrupt, samples hold what was measured so far.
    """

    calls: Sequence[TimedCall]
    rounds: int
    max_seconds: float
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep
    samples: dict[str, dict[int, float]] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    _pool: str = ""

    def run(self, on_round: Callable[[int], None] = lambda number: None) -> None:
        """Warm up, then run all rounds. on_round is called with the number of rounds done."""
        lengths = {call.name: self.warmed_up(call) for call in self.calls}
        self.samples.update({call.name: {} for call in self.calls})
        for number in range(self.rounds):
            active = [call for call in self.calls if self.wants_more(call.name)]
            if not active:
                break
            for call in active:
                self.turn(call, number, wake_up=lengths[call.name] < WAKE_UP_BELOW_SECONDS)
            on_round(number + 1)

    def wants_more(self, name: str) -> bool:
        own = self.samples[name]
        return name not in self.failures and (len(own) < FEWEST_ROUNDS or sum(own.values()) < self.max_seconds)

    def warmed_up(self, call: TimedCall) -> float:
        """Run it until its caches, pools and compilers are ready; returns the seconds of the last run."""
        seconds = 0.0
        for _ in range(WARM_UP_RUNS):
            seconds = self.guarded(call)
            if seconds > LONG_SECONDS:
                break
        return seconds

    def turn(self, call: TimedCall, number: int, *, wake_up: bool) -> None:
        if call.pool != self._pool:
            self.sleep(PAUSE_SECONDS)
            self._pool = call.pool
        if wake_up:
            self.guarded(call)
        # one delay by the scheduler would outweigh a short run, so its median is taken
        seconds = statistics.median(self.guarded(call) for _ in range(SHORT_RUNS if wake_up else 1))
        if call.name not in self.failures:
            self.samples[call.name][number] = seconds

    def guarded(self, call: TimedCall) -> float:
        """Seconds of one call. A call that raises takes no more turns, and the others go on."""
        if call.name in self.failures:
            return 0.0
        start = self.clock()
        try:
            call.run()
        except Exception as error:  # runtimes have no common base class for their errors
            self.failures[call.name] = error
        return self.clock() - start

    def median_ms(self, name: str) -> float | None:
        """Median milliseconds of a call; None if nothing was measured."""
        own = self.samples.get(name)
        return statistics.median(own.values()) * 1e3 if own else None


def timing_from_samples(seconds: Sequence[float]) -> Timing:
    """The statistics of at least one run."""
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
    """How many times faster than the other: the median over the rounds of both; None without any."""
    ratios = [other[number] / seconds for number, seconds in own.items() if number in other and seconds > 0]
    return statistics.median(ratios) if ratios else None
