"""The simulation of docs/scale.md against what queueing theory knows exactly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from serving_simulation import simulate

SCRIPT = Path(__file__).parents[1] / "scripts" / "simulate_serving.py"


def poisson(rate: float, count: int) -> list[float]:
    return [float(value) for value in np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_single_rows_wait_as_long_as_the_formula_of_pollaczek_and_khinchine_says(load: float) -> None:
    """M/D/1: mean wait = load · s / (2 (1 − load))."""
    result = simulate(poisson(load, 50_000), lambda rows: 1.0, max_batch=1, queue_size=10**9)
    wait = float(np.mean(result.latencies_s)) - 1.0
    # the mean of 50,000 correlated waits: within 10 %
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.1)


def test_exponential_runs_wait_as_long_as_the_formula_of_m_m_1_says() -> None:
    """M/M/1: mean time in the system = s / (1 − load)."""
    dice = np.random.default_rng(1)
    result = simulate(poisson(0.7, 50_000), lambda rows: float(dice.exponential(1.0)), max_batch=1, queue_size=10**9)
    assert float(np.mean(result.latencies_s)) == pytest.approx(1 / 0.3, rel=0.1)


def test_a_run_costs_the_same_for_all_its_rows_when_it_does() -> None:
    result = simulate([0.0] * 64, lambda rows: 1.0, max_batch=8, queue_size=100)
    assert result.batches == [8] * 8
    assert result.end_s == 8.0


def test_what_the_queue_does_not_hold_is_refused() -> None:
    result = simulate([0.0] * 10, lambda rows: 1.0, max_batch=2, queue_size=4)
    assert (result.refused, len(result.latencies_s)) == (6, 4)


def test_overload_is_answered_at_the_rate_of_the_runner() -> None:
    result = simulate(poisson(200.0, 20_000), lambda rows: 0.1 + 0.01 * rows, max_batch=8, queue_size=32)
    # all runs but the first and the last are full
    assert result.mean_batch == pytest.approx(8, abs=0.1)
    assert result.per_s == pytest.approx(8 / 0.18, rel=0.02)
    assert result.refused > 10_000


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_serving", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.requires("torch", "ort", "serve")
def test_replicas_are_as_many_as_keep_the_tail_within_the_limit(script: ModuleType) -> None:
    # 20 ms a run, whatever its rows: eight rows make at most 400 requests per second
    curve = {rows: [0.02] for rows in range(1, 9)}
    few = script.replicas_for(rate=100.0, curve=curve, limit_ms=100.0)
    many = script.replicas_for(rate=4000.0, curve=curve, limit_ms=100.0)
    assert few == 1
    assert 10 < many <= 20
    assert script.replicas_for(rate=100.0, curve=curve, limit_ms=10.0) is None
