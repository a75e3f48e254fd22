"""Turns, budgets and ratios, with a clock that stands still unless somebody works."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from effexport.bench.measuring.timing import Rotation, TimedCall, times_faster, timing_from_samples


class FakeClock:
    """Time that passes only when somebody works or sleeps. log: who worked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.log.append("pause")
        self.now += seconds

    def worker(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.log.append(name)
            self.now += seconds

        return work


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def rotation_of(clock: FakeClock, seconds: dict[str, float], rounds: int = 4, max_seconds: float = 1e9) -> Rotation:
    calls = [TimedCall(name, clock.worker(name, length), name) for name, length in seconds.items()]
    return Rotation(calls, rounds, max_seconds, clock=clock, sleep=clock.sleep)


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
    Rotation(calls, 2, 1e9, clock=clock, sleep=clock.sleep).run()
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
    rotation = Rotation([TimedCall("bad", fail, "bad"), good], 4, 1e9, clock=clock, sleep=clock.sleep)
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
    assert times_faster({0: 1.0, 1: 10.0, 2: 1.0}, {0: 2.0, 1: 20.0}) == 2.0
    assert times_faster({0: 1.0}, {}) is None
