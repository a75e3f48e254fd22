"""Memory leaks of engines: the line through the samples, and soaks on the fake TensorRT."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from engine_machine import SEQ_LEN, Machine, series
from fake_tensorrt import FakeCuda
from gpu.engines import feeds, fresh, fresh_process

from effexport.runners.options import RunOptions


class LeakyCuda(FakeCuda):
    """Loses memory whenever it is asked."""

    def memory_info(self) -> tuple[int, int]:
        super().memory_info()
        return (1 << 40) - self.counts["memory_info"] * (4 << 20), 1 << 40


def noise(amplitude: int) -> Callable[[int], float]:
    generator = random.Random(5)
    return lambda run: generator.uniform(-amplitude, amplitude)


def test_memory_that_stays_the_same_is_no_leak() -> None:
    fit = fresh.fit_memory(series(lambda run: 5e9))
    assert fit.problem == ""
    assert fit.bytes_per_run == pytest.approx(0, abs=1e-6)


def test_what_is_taken_at_the_beginning_is_no_leak() -> None:
    assert fresh.fit_memory(series(lambda run: 5e9 + min(run, 600) * 1e6)).problem == ""


@pytest.mark.parametrize("at", range(700, 2000, 100))
def test_one_late_allocation_is_no_leak(at: int) -> None:
    assert fresh.fit_memory(series(lambda run: 5e9 + (run > at) * fresh.GRANULE_BYTES)).problem == ""


@pytest.mark.parametrize("bytes_per_run", [4096, 20_000, 1 << 20])
def test_memory_that_grows_is_a_leak(bytes_per_run: int) -> None:
    fit = fresh.fit_memory(series(lambda run: 5e9 + run * bytes_per_run))
    assert fit.bytes_per_run == pytest.approx(bytes_per_run)
    assert f"memory grows by {bytes_per_run} bytes per run" in fit.problem


def test_a_leak_that_shows_in_whole_pieces_is_a_leak() -> None:
    piece = fresh.GRANULE_BYTES
    assert "memory grows" in fresh.fit_memory(series(lambda run: run * 8000 // piece * piece)).problem


def test_noise_is_no_leak_and_does_not_hide_one() -> None:
    jitter = noise(4 << 20)
    assert fresh.fit_memory(series(lambda run: 5e9 + jitter(run))).problem == ""
    assert "memory grows" in fresh.fit_memory(series(lambda run: 5e9 + jitter(run) + run * 50_000)).problem


def test_noise_that_could_hide_a_leak_does_not_pass() -> None:
    jitter = noise(1 << 30)
    assert "would not show" in fresh.fit_memory(series(lambda run: 5e9 + jitter(run))).problem


def test_more_runs_see_smaller_leaks() -> None:
    short, long = (fresh.fit_memory(series(lambda run: run * 500, runs)) for runs in (2000, 20_000))
    assert short.problem == ""
    assert "memory grows by 500" in long.problem


def test_a_fit_that_is_not_a_number_does_not_pass() -> None:
    for values in ((math.nan, 0.0, 1.0), (0.0, math.nan, 1.0)):
        assert fresh.MemoryFit(*values).problem


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="run at least 600 times"):
        fresh.fit_memory(series(lambda run: 0, runs=300))
    fresh.fit_memory(series(lambda run: 0, runs=600))


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_a_soak_runs_many_shapes_and_samples_memory(machine: Machine, graphs: bool) -> None:
    with machine.open(machine.model.engine, RunOptions(runtime="trt", cuda_graph=graphs)) as runner:
        found = fresh_process.soak(runner, FakeCuda(), 600, 258)
    assert [run for run, _ in found["samples"]] == [0, 100, 200, 300, 400, 500, 600]
    assert found["shapes"] >= 20
    assert ("capture" in machine.cudas[0].counts) == graphs
    outcome = fresh.judge_soak(found)
    assert outcome.problem == ""
    assert outcome.data["fit"]["limit_bytes_per_run"] == pytest.approx(1.5 * (2 << 20) / 300)
    machine.cudas[0].assert_nothing_left()


def test_a_soak_ends_when_its_time_is_up_and_says_how_far_it_came(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(fresh_process.time, "monotonic", lambda: next(clock))
    with machine.open(machine.model.engine) as runner:
        found = fresh_process.soak(runner, FakeCuda(), 2000, 258, seconds=7)
    assert (found["runs"], found["runs_wanted"]) == (600, 2000)
    assert found["samples"][-1][0] == 600
    assert fresh.judge_soak(found).problem == ""


def test_a_soak_that_leaks_fails(machine: Machine) -> None:
    with machine.open(machine.model.engine) as runner:
        found = fresh_process.soak(runner, LeakyCuda(), 600, 258)
    assert "memory grows by 41943 bytes per run" in fresh.judge_soak(found).problem


def test_a_soak_whose_answers_change_fails(machine: Machine) -> None:
    generator = np.random.default_rng(0)

    def spoil(output: np.ndarray) -> None:
        output[0, 0, 0] = generator.standard_normal()

    machine.spoil = spoil
    with machine.open(machine.model.engine) as runner:
        found = fresh_process.soak(runner, FakeCuda(), 600, 258)
    assert found["runs_that_differ"] == 600 - fresh_process.SHAPES
    assert "gave other bits" in fresh.judge_soak(found).problem


def test_the_shapes_of_a_soak_are_distinct_and_within_the_profile(machine: Machine) -> None:
    with machine.open(machine.model.engine) as runner:
        sizes = feeds.random_sizes(runner, 24, np.random.default_rng(0))
        everything = feeds.random_sizes(runner, 10_000, np.random.default_rng(0))
    assert len({tuple(size.values()) for size in sizes}) == 24
    assert {"batch": 1, "seq": 1} in sizes
    assert {"batch": 4, "seq": SEQ_LEN} in sizes
    assert all(1 <= size["batch"] <= 4 and 1 <= size["seq"] <= SEQ_LEN for size in everything)
    assert len(everything) == 4 * SEQ_LEN
