"""Turns, budgets and ratios, with a clock that stands still unless somebody works."""

from __future__ import annotations

import itertools
import statistics

import pytest
from planted_machine import FakeClock, PlantedMachine, waiting

from effexport.bench.timing import (
    MOST_SHORT_RUNS,
    SETTLE_SECONDS,
    SHORT_RUNS,
    Rotation,
    TimedCall,
    disturbance_of,
    times_faster,
    timing_from_samples,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def rotation_of(clock: FakeClock, seconds: dict[str, float], rounds: int = 4, max_seconds: float = 1e9) -> Rotation:
    calls = [TimedCall(name, clock.worker(name, length), name) for name, length in seconds.items()]
    return in_turns(clock, calls, rounds, max_seconds)


def in_turns(
    clock: FakeClock,
    calls: list[TimedCall],
    rounds: int,
    max_seconds: float = 1e9,
    machine: PlantedMachine | None = None,
) -> Rotation:
    machine = machine or PlantedMachine(clock)
    return Rotation(calls, rounds, max_seconds, machine, clock=clock, sleep=clock.sleep)


def test_calls_take_turns(clock: FakeClock) -> None:
    rotation = rotation_of(clock, {"a": 0.5, "b": 0.3, "c": 0.4}, rounds=3)
    rotation.run()
    assert clock.log == ["a", "a", "b", "b", "c", "c"] + ["pause", "a", "pause", "b", "pause", "c"] * 3
    assert {name: list(own) for name, own in rotation.samples.items()} == {name: [0, 1, 2] for name in "abc"}
    assert rotation.samples["b"][1] == pytest.approx(0.3)


def test_short_runs_get_an_untimed_one_first(clock: FakeClock) -> None:
    rotation_of(clock, {"a": 0.01}, rounds=2).run()
    # two to warm up; then, twice, one untimed run and three whose median counts
    assert clock.log == ["a", "a", "pause", *"aaaa", *"aaaa"]


def test_calls_of_one_pool_need_no_pause(clock: FakeClock) -> None:
    calls = [TimedCall(name, clock.worker(name, 1.5), "torch") for name in "ab"]
    in_turns(clock, calls, 2).run()
    assert clock.log == ["a", "b", "pause", "a", "b", "a", "b"]


def test_a_slow_call_stops_after_its_budget_and_the_others_go_on(clock: FakeClock) -> None:
    rotation = rotation_of(clock, {"slow": 4.0, "quick": 0.5, "very slow": 100.0}, rounds=10, max_seconds=18)
    rotation.run()
    assert {name: len(own) for name, own in rotation.samples.items()} == {"slow": 5, "quick": 10, "very slow": 3}


def test_a_call_that_raises_takes_no_more_turns(clock: FakeClock) -> None:
    def fail() -> None:
        clock.log.append("bad")
        if clock.log.count("bad") > 3:
            raise RuntimeError("no more")

    good = TimedCall("good", clock.worker("good", 0.5), "good")
    rotation = in_turns(clock, [TimedCall("bad", fail, "bad"), good], 4)
    rotation.run()
    assert str(rotation.failures["bad"]) == "no more"
    assert len(rotation.samples["good"]) == 4


def test_an_interrupt_leaves_the_samples_so_far(clock: FakeClock) -> None:
    rotation = rotation_of(clock, {"a": 0.5, "b": 0.5}, rounds=10)

    def interrupt(number: int) -> None:
        if number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rotation.run(interrupt)
    assert {name: len(own) for name, own in rotation.samples.items()} == {"a": 4, "b": 4}


def test_a_timing_says_median_spread_mean_and_deviation() -> None:
    timing = timing_from_samples([0.005, 0.001, 0.002, 0.003, 0.004])
    assert (timing.runs, timing.median_ms, timing.mean_ms) == (5, pytest.approx(3), pytest.approx(3))
    assert (timing.lowest_ms, timing.highest_ms, timing.spread_ms) == (1, 5, pytest.approx(1))
    assert timing.deviation_ms == pytest.approx(2.5**0.5)
    alone = timing_from_samples([0.002])
    assert (alone.median_ms, alone.deviation_ms, alone.spread_ms) == (2, 0, 0)


def test_a_ratio_is_taken_within_rounds() -> None:
    # both are ten times slower in the second round: the ratio is the same
    assert times_faster({0: 1.0, 1: 10.0, 2: 1.0}, {0: 2.0, 1: 20.0}, 2) == 2.0
    assert times_faster({0: 1.0}, {}, 1) is None


def test_a_ratio_needs_as_many_shared_rounds_as_a_median_needs_rounds(clock: FakeClock) -> None:
    own, other = dict.fromkeys(range(4), 1.0), dict.fromkeys(range(2, 6), 1.3)
    assert (rotation_of(clock, {}, rounds=15).fewest, rotation_of(clock, {}, rounds=2).fewest) == (3, 2)
    assert times_faster(own, other, 3) is None
    assert times_faster(own | {4: 1.0}, other, 3) == 1.3


# ---- beside other programs


@pytest.mark.parametrize(
    ("seconds", "rounds", "waits", "others", "kept", "disturbed"),
    [
        # one run to warm up, then the second and third of four rounds wait for more than 5 % of their time
        pytest.param(2.0, 4, [9.0, 0.0, 0.2, 0.3, 0.09], 0.0, [0, 3, 4, 5], [1, 2], id="dropped and repeated"),
        pytest.param(2.0, 6, [0.0, 1.0, 1.0] * 9, 1.0, [2, 5, 8, 11], 8, id="repeated at most as often as planned"),
        pytest.param(2.0, 6, [1.0] * 99, 1.0, [], 6, id="always disturbed, so not repeated"),
        pytest.param(2.0, 4, [1.0] * 99, 0.0, [0, 1, 2, 3], 0, id="waits for itself on an idle machine"),
        pytest.param(0.0002, 3, [0.00004] * 99, 0.0, [0, 1, 2], 0, id="waking a thread is no disturbance"),
        # two to warm up and one to wake up come first; the undisturbed ones come last
        pytest.param(0.01, 1, [0.4] * (4 + MOST_SHORT_RUNS - SHORT_RUNS), 1.0, [], 1, id="too few short runs"),
        pytest.param(0.01, 1, [0.4] * (3 + MOST_SHORT_RUNS - SHORT_RUNS), 1.0, [0], 0, id="just enough short runs"),
    ],
)
def test_rounds_in_which_threads_waited_do_not_count(
    clock: FakeClock,
    seconds: float,
    rounds: int,
    waits: list[float],
    others: float,
    kept: list[int],
    disturbed: list[int] | int,
) -> None:
    machine = PlantedMachine(clock)
    machine.others = others
    work = waiting(machine, clock.worker("a", seconds), iter(waits))
    rotation = in_turns(clock, [TimedCall("a", work, "a")], rounds, machine=machine)
    rotation.run()
    assert list(rotation.samples["a"]) == kept
    found = list(rotation.disturbed["a"])
    assert (found if isinstance(disturbed, list) else len(found)) == disturbed
    assert (rotation.median_ms("a") is None) == (len(kept) < rotation.fewest)
    if disturbed == [1, 2]:
        assert rotation.timed["a"] == pytest.approx(6 * 2.0)
        # of the undisturbed rounds: 0.09 of 2 seconds in one of four
        assert disturbance_of(rotation, "a").waited_share == pytest.approx(0.09 / 2 / 4)


def test_a_short_call_is_repeated_at_once_and_disturbed_runs_do_not_count(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)
    machine.others = 1.0
    lengths = iter([0.01] * 3 + [0.5, 0.01, 0.7, 0.02, 0.03])

    def work() -> None:
        seconds = next(lengths)
        clock.now += seconds
        assert machine.waited is not None
        machine.waited += 0.4 if seconds > 0.1 else 0.0

    rotation = in_turns(clock, [TimedCall("a", work, "a")], 1, machine=machine)
    rotation.run()
    assert rotation.samples["a"] == {0: pytest.approx(0.02)}
    assert list(lengths) == []
    always = waiting(machine, clock.worker("b", 0.01), itertools.repeat(0.4))
    rotation = in_turns(clock, [TimedCall("b", always, "b")], 1, machine=machine)
    rotation.run()
    assert len(rotation.runs["b"][0]) == MOST_SHORT_RUNS
    assert rotation.samples["b"] == {}


class SlowMachine(PlantedMachine):
    """A machine whose readings take a millisecond, in which both cores compute and three threads wait for one."""

    def passes(self) -> None:
        assert isinstance(self.clock, FakeClock)
        assert self.waited is not None
        self.clock.now += 0.001
        self.own += 2 * 0.001
        self.waited += 3 * 0.001

    def own_seconds(self) -> float:
        self.passes()
        return super().own_seconds()

    def waits(self) -> dict[str, float] | None:
        self.passes()
        return super().waits()


def test_what_happens_during_the_readings_is_not_ascribed_to_a_call_of_microseconds(clock: FakeClock) -> None:
    machine = SlowMachine(clock)
    rotation = in_turns(clock, [TimedCall("a", clock.worker("a", 3e-5), "a")], 3, machine=machine)
    rotation.run()
    found = disturbance_of(rotation, "a")
    assert found.own_cores is not None
    assert found.waited_share is not None
    assert 0 < found.own_cores <= machine.cores
    assert 0 < found.waited_share <= 3
    assert statistics.median(rotation.samples["a"].values()) == pytest.approx(3e-5)


def test_a_thread_that_never_got_a_core_disturbs_although_its_wait_is_not_counted_yet(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)
    machine.others = 1.0
    machine.is_waiting = lambda: True  # type: ignore[method-assign]
    rotation = in_turns(clock, [TimedCall("a", clock.worker("a", 2.0), "a")], 3, machine=machine)
    rotation.run()
    assert rotation.samples["a"] == {}


def test_the_host_of_a_virtual_machine_is_somebody_else_too(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)
    machine.stolen = 0.2
    work = waiting(machine, clock.worker("a", 2.0), itertools.repeat(1.0))
    rotation = in_turns(clock, [TimedCall("a", work, "a")], 4, machine=machine)
    rotation.run()
    assert rotation.samples["a"] == {}


def test_with_more_threads_than_cores_waiting_says_nothing(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)
    work = waiting(machine, clock.worker("a", 2.0), itertools.repeat(1.0))
    calls = [TimedCall("a", work, "a")]
    rotation = Rotation(calls, 3, 1e9, machine, judges_waits=False, clock=clock, sleep=clock.sleep)
    rotation.run()
    assert len(rotation.samples["a"]) == 3
    assert not rotation.sees_waits("a")


def test_a_call_begins_when_the_threads_of_the_last_one_have_stopped_spinning(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)
    spins_until = 0.0

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        machine.own += max(0.0, min(clock.now, spins_until) - (clock.now - seconds))

    def spinning() -> None:
        nonlocal spins_until
        clock.worker("a", 0.5)()
        spins_until = clock.now + 0.03

    calls = [TimedCall("a", spinning, "a"), TimedCall("b", clock.worker("b", 0.5), "b")]
    rotation = Rotation(calls, 1, 1e9, machine, clock=clock, sleep=sleep)
    rotation.run()
    after = clock.log[clock.log.index("b", 4) - 8 : clock.log.index("b", 4)]
    assert after == ["a", *["pause"] * 7]


def test_threads_that_never_stop_are_not_waited_for_forever(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        machine.own += seconds

    rotation = Rotation([TimedCall("a", clock.worker("a", 0.5), "a")], 1, 1e9, machine, clock=clock, sleep=sleep)
    rotation.run()
    assert clock.now == pytest.approx(2 * 0.5 + SETTLE_SECONDS + 0.5, abs=0.01)


def test_what_others_used_is_known_after_an_interrupt_too(clock: FakeClock) -> None:
    machine = PlantedMachine(clock)
    machine.others, machine.stolen = 1.25, 0.5
    rotation = in_turns(clock, [TimedCall("a", clock.worker("a", 0.5), "a")], 9, machine=machine)

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rotation.run(interrupt)
    assert rotation.use is not None
    assert (rotation.use.others, rotation.use.stolen) == (pytest.approx(1.25), pytest.approx(0.5))
