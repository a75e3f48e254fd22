"""Interleaved timing: every round runs each call once, A B C A B C …, so that slow changes of the machine, such as of
its clock rate, affect all of them, and ratios are taken within a round.

A run is disturbed if threads of this process waited for a core, because other programs had it. Disturbed runs are
repeated, within bounds, and do not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from effexport.base.formatting import rough_duration
from effexport.base.machine import CoreUse, Machine, waited_between
from effexport.bench.grid import BenchRow, Disturbance, Floor, Timing


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement. threads: of each runtime (None: one per core). max_seconds: timed, per row.

    parity: compare with PyTorch before timing. memory: measure it too, except of rows slower than `longest_ms`.
    wait_seconds: the longest total wait for other programs to leave the machine alone.
    """

    rounds: int = 15
    max_seconds: float = 10.0
    threads: int | None = None
    parity: bool = True
    memory: bool = True
    longest_ms: float = math.inf
    wait_seconds: float = 0.0
    preset: str = ""
    command: str = ""


# The use of cores is counted in hundredths of a second, so a shorter look would not see 5 %.
LOOK_SECONDS = 2.0


def wait_until_idle(
    machine: Machine,
    seconds: float,
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> float:
    """Wait until others leave our cores alone, for at most `seconds`. Returns the seconds that are left of them."""
    end, message, using = clock() + seconds, "", ""
    start = machine.core_times()
    while clock() < end:
        sleep(min(LOOK_SECONDS, max(0.0, end - clock())))
        use = machine.use_since(start)
        if use is None or use.others + use.stolen <= machine.idle_cores:
            return max(0.0, end - clock())
        using = f"other programs use {use.others + use.stolen:.1f} of {machine.cores} cores"
        # the same text throughout: logs show each text once
        message = message or f"waiting at most {rough_duration(seconds)} for an idle machine: {using}"
        say(message)
        start = machine.core_times()
    say(f"the machine is still not idle: {using}; measuring now")
    return 0.0


WARM_UP_RUNS = 2
# Thread pools spin after a run, PyTorch's for 5 ms and ONNX Runtime's for 30 ms of CPU time, which takes cores from the
# next call. So a call starts when this process uses less than QUIET_SHARE of one core, after at most SETTLE_SECONDS.
PAUSE_SECONDS, QUIET_SHARE, SETTLE_SECONDS = 0.005, 0.1, 0.5
# A shorter run first runs untimed, to wake its threads and fill its caches; in a longer run, that does not matter.
WAKE_UP_BELOW_SECONDS = 0.2
# The turn of a short call is the median of this many undisturbed runs; it is disturbed if MOST_SHORT_RUNS have fewer.
SHORT_RUNS, MOST_SHORT_RUNS = 3, 9
# A call that takes this long is warm after one run.
LONG_SECONDS = 1.0
# A median of fewer rounds says little, so the time budget does not end a row earlier.
FEWEST_ROUNDS = 3
# After the planned rounds, disturbed ones are repeated, at most as many again.
MOST_TIMES_ROUNDS = 2
# Waiting lengthens a run by at most the time that its threads waited, so an undisturbed run is at most 5 % too long.
# Waking a thread takes up to 0.05 ms on an idle machine; that belongs to the call. Other programs get a core for 3 ms.
WAITED_SHARE, WAKING_SECONDS = 0.05, 5e-5
# Other programs make a timing at most about this many times too long: each core is then shared with three of them.
MOST_DISTURBED = 4


@dataclass(frozen=True)
class TimedCall:
    """A call to time. pool: the thread pool that runs it; calls of one pool do not disturb each other."""

    name: str
    run: Callable[[], object]
    pool: str


@dataclass(frozen=True)
class Watched:
    """One timed run. seconds: its length. own: cores that this process used. waited: cores that its threads waited for.

    The last two are averages between the readings of their counters, which are just outside the run: in a run of some
    microseconds, the readings take longer than the run. waited is None if the system does not tell.
    """

    seconds: float
    own: float
    waited: float | None
    is_disturbed: bool


@dataclass
class Rotation:
    """Calls that take turns. samples: per call, seconds by undisturbed round. failures: what calls raised.

    disturbed: per call, seconds by disturbed round. runs: per call and round, the runs whose median that is.
    timed: per call, the seconds of all timed runs. use: what others used meanwhile.
    max_seconds: the timed seconds after which a call takes no more turns. clock, sleep, machine: for tests.
    judges_waits: False if the calls have more threads than there are cores, so that they wait for each other.
    After an interrupt, samples hold what was measured so far.
    """

    calls: Sequence[TimedCall]
    rounds: int
    max_seconds: float
    machine: Machine = field(default_factory=Machine)
    judges_waits: bool = True
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep
    samples: dict[str, dict[int, float]] = field(default_factory=dict)
    disturbed: dict[str, dict[int, float]] = field(default_factory=dict)
    runs: dict[str, dict[int, list[Watched]]] = field(default_factory=dict)
    timed: dict[str, float] = field(default_factory=dict)
    use: CoreUse | None = None
    failures: dict[str, Exception] = field(default_factory=dict)
    _shortest: dict[str, float] = field(default_factory=dict)
    _pool: str = ""

    def run(self, on_round: Callable[[int], None] = lambda number: None) -> None:
        """Warm up, then run all rounds. on_round is called with the number of rounds done."""
        for call in self.calls:
            self._shortest[call.name] = self.warmed_up(call)
            self.samples[call.name], self.disturbed[call.name] = {}, {}
            self.runs[call.name], self.timed[call.name] = {}, 0.0
        start = self.machine.core_times()
        try:
            for number in range(MOST_TIMES_ROUNDS * self.rounds):
                active = [call for call in self.calls if self.wants_more(call.name, number)]
                if not active:
                    break
                for call in active:
                    self.turn(call, number)
                on_round(number + 1)
        finally:
            self.use = self.machine.use_since(start)
            self.keep_own_waits()

    def keep_own_waits(self) -> None:
        """Count the disturbed rounds of a call that has hardly any others if nobody else used the machine.

        Such a call makes its own threads wait, for example because it wakes them for every operation.
        """
        if self.use is None or self.use.others + self.use.stolen > self.machine.idle_cores:
            return
        for name, good in self.samples.items():
            if not self.has_enough(good):
                self.samples[name] = good | self.disturbed[name]
                self.disturbed[name] = {}

    def wants_more(self, name: str, number: int) -> bool:
        good, bad = len(self.samples[name]), len(self.disturbed[name])
        if name in self.failures or good >= self.rounds:
            return False
        # what was never undisturbed in the planned rounds would hardly be in further ones
        if number >= self.rounds and not good:
            return False
        return good + bad < FEWEST_ROUNDS or self.timed[name] < self.max_seconds

    def warmed_up(self, call: TimedCall) -> float:
        """Run it until its caches, pools and compilers are ready; returns the seconds of the shortest run."""
        lengths: list[float] = []
        while len(lengths) < WARM_UP_RUNS and not any(seconds > LONG_SECONDS for seconds in lengths):
            lengths.append(self.guarded(call))
        return min(lengths)

    def turn(self, call: TimedCall, number: int) -> None:
        """Run a call until it was undisturbed, within bounds, and keep the median."""
        if call.pool != self._pool:
            self.settle()
            self._pool = call.pool
        is_short = self._shortest[call.name] < WAKE_UP_BELOW_SECONDS
        if is_short:
            self.guarded(call)
        good: list[Watched] = []
        bad: list[Watched] = []
        # one delay by the scheduler would outweigh a short run, so its median is taken
        wanted, most = (SHORT_RUNS, MOST_SHORT_RUNS) if is_short else (1, 1)
        while len(good) < wanted and len(good) + len(bad) < most:
            run = self.watched(call)
            (bad if run.is_disturbed else good).append(run)
        if call.name not in self.failures:
            self._shortest[call.name] = min(self._shortest[call.name], *(run.seconds for run in good + bad))
            rounds = self.samples if len(good) == wanted else self.disturbed
            self.runs[call.name][number] = good or bad
            rounds[call.name][number] = statistics.median(run.seconds for run in good or bad)

    def settle(self) -> None:
        """Wait until the threads of the last call have stopped spinning."""
        end = self.clock() + SETTLE_SECONDS
        while True:
            start, own = self.clock(), self.machine.own_seconds()
            self.sleep(PAUSE_SECONDS)
            now = self.clock()
            if self.machine.own_seconds() - own <= QUIET_SHARE * (now - start) or now >= end:
                return

    def watched(self, call: TimedCall) -> Watched:
        """Time one call, and tell whether its threads had to wait for a core."""
        waits_start, before = self.clock(), self.machine.waits()
        own_start, own = self.clock(), self.machine.own_seconds()
        seconds = self.guarded(call)
        own, own_end = self.machine.own_seconds() - own, self.clock()
        is_waiting = self.machine.is_waiting()
        waited, waits_end = waited_between(before, self.machine.waits()), self.clock()
        self.timed[call.name] += seconds
        is_disturbed = waited is not None and (is_waiting or waited > max(WAKING_SECONDS, WAITED_SHARE * seconds))
        return Watched(
            seconds,
            per_second(own, own_end - own_start),
            None if waited is None else per_second(waited, waits_end - waits_start),
            is_disturbed and self.judges_waits,
        )

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

    def used_rounds(self, name: str) -> dict[int, float]:
        """Seconds by round that the timing of a call is made of: the undisturbed ones, or all if they are too few."""
        good, bad = self.samples.get(name, {}), self.disturbed.get(name, {})
        return good if self.has_enough(good) else good | bad

    def median_ms(self, name: str) -> float | None:
        """Median milliseconds of the undisturbed rounds of a call; None if they are too few."""
        own = self.samples.get(name, {})
        return statistics.median(own.values()) * 1e3 if self.has_enough(own) else None

    def sees_waits(self, name: str) -> bool:
        """True if waits for a core reveal the disturbed runs of a call."""
        return self.judges_waits and all(run.waited is not None for runs in self.runs[name].values() for run in runs)

    def has_enough(self, rounds: Collection[int]) -> bool:
        return len(rounds) >= self.fewest

    @property
    def fewest(self) -> int:
        """The number of rounds below which a median says little."""
        return min(FEWEST_ROUNDS, self.rounds)


def per_second(value: float, seconds: float) -> float:
    """0 if no time passed, as with a clock that is coarser than the call."""
    return value / seconds if seconds > 0 else 0.0


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


def times_faster(own: dict[int, float], other: dict[int, float], fewest: int) -> float | None:
    """The speedup over the other: the median over the rounds of both; None with fewer than `fewest`."""
    ratios = [other[number] / seconds for number, seconds in own.items() if number in other and seconds > 0]
    return statistics.median(ratios) if len(ratios) >= fewest else None


def timed_row(row: BenchRow, rotation: Rotation, name: str, floor: Floor | None) -> BenchRow:
    """The row of a call with its timing; disturbed, with a reason, if that may not be quoted."""
    # what this system cannot show
    note = "" if rotation.sees_waits(name) else NOTHING_KNOWN if rotation.use is None else NO_WAITS
    timed = replace(
        row,
        timing=timing_from_samples([*rotation.used_rounds(name).values()]),
        floor=floor,
        disturbance=disturbance_of(rotation, name),
        note="; ".join(filter(None, (row.note, note))),
    )
    reason = reason_disturbed(timed, rotation, name)
    return replace(timed, status="disturbed", reason=reason) if reason else timed


# Fused kernels take less than the floor, whose products go through memory and are as fast as PyTorch's library makes
# them on this processor: 0.36 of it at least on idle machines (an AMD EPYC with AVX-512; docs/benchmarks.md). What
# takes clearly less was not measured together with its floor under equal conditions.
LEAST_TIMES_FLOOR = 0.3
NO_WAITS = "this system does not tell how long threads wait for a core; rows were judged by the use of all cores"
NOTHING_KNOWN = "this system does not tell what other programs do, so disturbed runs were not found"


def disturbance_of(rotation: Rotation, name: str) -> Disturbance:
    """The known disturbance of one call in the rotation."""
    use = rotation.use
    runs = [run for number in rotation.used_rounds(name) for run in rotation.runs[name][number]]
    waited = [run.waited for run in runs if run.waited is not None]
    return Disturbance(
        kept=len(rotation.samples[name]),
        dropped=len(rotation.disturbed[name]),
        waited_share=fmean(waited) if waited else None,
        own_cores=fmean(run.own for run in runs) if runs else None,
        other_cores=None if use is None else use.others,
        stolen_cores=None if use is None else use.stolen,
    )


def reason_disturbed(row: BenchRow, rotation: Rotation, name: str) -> str:
    """The reason the timing of a row may not be quoted; "" if it may."""
    machine, use = rotation.machine, rotation.use
    used = "" if use is None else f"other programs used {use.others:.1f} of {machine.cores} cores"
    if not rotation.has_enough(rotation.samples[name]):
        return "; ".join(filter(None, ("its threads had to wait for a core in too many rounds", used)))
    if use is not None and use.stolen > machine.idle_cores:
        return f"the host of this virtual machine took {use.stolen:.1f} of {machine.cores} cores"
    if use is not None and use.others > machine.idle_cores and not rotation.sees_waits(name):
        return used
    if row.times_floor is not None and row.times_floor < LEAST_TIMES_FLOOR:
        return f"it took less than {LEAST_TIMES_FLOOR} of its floor, so one of the two was disturbed"
    return ""
