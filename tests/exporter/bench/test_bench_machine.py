"""Readings of the machine, from planted files, and waiting until it is idle."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from planted_machine import FakeClock, PlantedMachine

from effexport.base import machine
from effexport.base.machine import CoreTimes, Machine, waited_between
from effexport.bench.timing import LOOK_SECONDS, wait_until_idle

# user nice system idle iowait irq softirq steal guest guest_nice, in hundredths of a second
STAT = """cpu  900 0 900 9000 0 0 0 900 0 0
cpu0 100 10 20 5000 50 3 2 40 100 0
cpu1 200 0 30 5000 50 0 5 60 0 0
cpu12 999 999 999 0 0 999 999 999 0 0
intr 1 2 3
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in the place of /proc: two cores for this process, and two threads."""
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr(machine, "TASKS", tmp_path / "task")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    (tmp_path / "stat").write_text(STAT)
    for thread, text in {"7": "5000 2000000000 3\n", "8": "0 500000000 1\n"}.items():
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "schedstat").write_text(text)
    return tmp_path


def test_waits_are_those_of_each_thread_in_seconds(planted: Path) -> None:
    assert Machine().waits() == {"7": 2.0, "8": 0.5}


def test_threads_that_begin_or_end_meanwhile_are_counted_as_far_as_known() -> None:
    assert waited_between({"7": 2.0, "8": 0.5}, {"7": 2.25, "9": 0.125}) == pytest.approx(0.375)
    assert waited_between(None, {"7": 1.0}) is None
    assert waited_between({"7": 1.0}, None) is None


def test_the_use_of_cores_is_that_of_our_cores_without_our_own(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine()
    monkeypatch.setattr(found, "own_seconds", lambda: 1.5)
    times = found.core_times()
    assert times is not None
    assert (times.busy, times.stolen, times.own) == (3.7, 1.0, 1.5)
    use = found.use_since(CoreTimes(times.wall - 2.0, 1.0, 2.2, 0.5))
    assert use is not None
    assert use.others == pytest.approx(0.5, rel=1e-3)
    assert use.stolen == pytest.approx(0.25, rel=1e-3)
    # ticks round: that others used less than nothing is not reported
    use = found.use_since(CoreTimes(times.wall - 2.0, 0.0, 3.6, 1.0))
    assert use is not None
    assert use.others == 0


@pytest.mark.parametrize("text", [None, "", "cpu0 1 2\n", "cpu0 a b c d e f g h\n", "cpu0 0 0 0 0 0 0 0 0 0 0\n"])
def test_a_system_that_does_not_count_is_unknown_and_not_idle(planted: Path, text: str | None) -> None:
    for path in (planted / "stat", planted / "task" / "7" / "schedstat"):
        path.unlink()
        if text is not None:
            path.write_text(text.replace("cpu0 ", "") if path.name == "schedstat" else text)
    (planted / "task" / "8" / "schedstat").write_text("0 0 0\n")
    assert Machine().core_times() is None
    assert Machine().use_since(None) is None
    assert Machine().waits() is None


def test_this_machine_is_read() -> None:
    found = Machine()
    if not machine.STAT.is_file() or found.waits() is None:
        pytest.skip("this system has no /proc/stat, or its kernel does not count waits")
    start, waits = found.core_times(), found.waits()
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        sum(range(1000))
    assert found.use_since(start) is not None
    waited = waited_between(waits, found.waits())
    assert waited is not None
    assert waited >= 0


@pytest.mark.parametrize(
    ("state", "later", "is_waiting"), [("R", 1.0, True), ("R", 1.000001, False), ("S", 1.0, False), ("R", None, False)]
)
def test_a_thread_waits_if_it_could_run_and_its_clock_stands_still(
    planted: Path, monkeypatch: pytest.MonkeyPatch, state: str, later: float | None, is_waiting: bool
) -> None:
    # 7 is the thread that asks
    monkeypatch.setattr(machine.threading, "get_native_id", lambda: 7)
    for thread, own_state in {"7": "R", "8": state}.items():
        (planted / "task" / thread / "stat").write_text(f"{thread} (a name) with) ) {own_state} 1 2 3\n")
    looks = {"8": iter([1.0, later])}
    monkeypatch.setattr(machine, "thread_seconds", lambda thread: next(looks[thread]))
    assert Machine().is_waiting() == is_waiting


def test_a_thread_that_sleeps_is_not_ready_and_has_a_clock() -> None:
    if not machine.TASKS.is_dir():
        pytest.skip("this system has no /proc")
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    try:
        assert machine.thread_seconds(str(thread.native_id)) is not None
        # on a busy machine, it takes a while until it has begun to sleep
        while str(thread.native_id) in Machine()._ready_threads():
            time.sleep(0.001)
    finally:
        event.set()
        thread.join()
    assert machine.thread_seconds(str(2**22 + 1)) is None


def wait(planted: PlantedMachine, clock: FakeClock, seconds: float) -> tuple[float, list[str]]:
    said: list[str] = []
    left = wait_until_idle(planted, seconds, said.append, clock=clock, sleep=clock.sleep)
    return left, said


def test_waiting_ends_when_others_leave_the_machine_alone() -> None:
    clock = FakeClock()
    planted = PlantedMachine(clock)
    busy_until = 7.0

    class Leaving(PlantedMachine):
        def core_times(self) -> CoreTimes:
            return CoreTimes(clock.now, 0.0, 1.5 * min(clock.now, busy_until), 0.0)

    left, said = wait(Leaving(clock), clock, 60)
    assert (clock.now, left) == (10.0, 50.0)
    assert set(said) == {"waiting at most 60 s for an idle machine: other programs use 1.5 of 2 cores"}
    assert wait(planted, clock, 60) == (58.0, [])


def test_waiting_is_bounded_and_says_that_it_was_in_vain() -> None:
    clock = FakeClock()
    planted = PlantedMachine(clock)
    planted.others, planted.stolen = 0.5, 0.25
    left, said = wait(planted, clock, 9)
    assert (clock.now, left) == (9.0, 0.0)
    assert said[-1] == "the machine is still not idle: other programs use 0.8 of 2 cores; measuring now"


def test_a_machine_that_tells_nothing_is_not_waited_for() -> None:
    clock = FakeClock()
    planted = PlantedMachine(clock)
    planted.others = None
    assert wait(planted, clock, 60)[1] == []
    assert clock.now == LOOK_SECONDS
