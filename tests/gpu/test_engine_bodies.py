"""Engines with plugins beside engines with function bodies, on the fake TensorRT."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from engine_machine import Machine
from gpu.engines import latency, page, records

from effexport.runners.options import RunOptions
from effexport.tensorrt.runner import TrtRunner


@pytest.fixture
def two_engines(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine.write_engine(machine.model.body_engine, implementation={"LSHSort": "body"})
    monkeypatch.setattr(latency, "LENGTHS", (16, 63, 512))
    monkeypatch.setattr(latency, "open_runner", machine.open)
    return machine


def test_both_engines_are_compared_and_timed_plain_and_as_graphs(two_engines: Machine) -> None:
    outcome = latency.compare_with_bodies(two_engines.model, timed=True)
    assert outcome.problem == ""
    assert [row["seq"] for row in outcome.data["compared"]] == [16, 63]  # the model has no 512 tokens
    for row in outcome.data["compared"]:
        assert row["difference"] == 0
        for name in ("plugins", "bodies", "plugins graph", "bodies graph"):
            assert 0 < row[name]["quartile_1_us"] <= row[name]["median_us"] <= row[name]["quartile_3_us"]
        for name in ("ratio", "ratio graph"):
            assert row[name]["quartile_1"] <= row[name]["median"] <= row[name]["quartile_3"]
    for cuda in two_engines.cudas:
        cuda.assert_nothing_left()
    assert [bool(cuda.counts.get("launch")) for cuda in two_engines.cudas] == [False, False, True, True]


def test_the_page_has_one_row_for_each_length_with_layers_and_plugins(two_engines: Machine) -> None:
    layer = {"name": "sort", "type": "Plugin", "outputs": [], "tactic": "0x1"}
    two_engines.write_engine(two_engines.model.engine, layers=(layer,) * 3)
    results = records.Results({})
    results.run("trt", "lsh fp16", "c", lambda: latency.compare_with_bodies(two_engines.model, timed=True))
    text = page.markdown_from_results(results)
    assert "| trt | lsh fp16 | c | passed |" in text
    rows = [
        line for line in text.splitlines() if line.startswith(("| trt | lsh fp16 | 16 |", "| trt | lsh fp16 | 63 |"))
    ]
    assert len(rows) == 2
    assert all(line.endswith("| 3, 1 | 0, 0 | LSHSort |") for line in rows)


def test_the_ratio_is_that_of_the_rounds_and_above_1_if_plugins_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"plugins": [1.0, 2.0, 4.0], "bodies": [3.0, 6.0, 12.0]}
    monkeypatch.setattr(latency, "timed_in_turns", lambda *given, **options: seconds)
    found = latency.timings({})
    assert found["ratio"] == {"median": 3.0, "quartile_1": 3.0, "quartile_3": 3.0}
    assert found["bodies"]["median_us"] == 6e6
    assert "ratio graph" not in found


def test_without_timing_only_the_outputs_are_compared(two_engines: Machine) -> None:
    outcome = latency.compare_with_bodies(two_engines.model, timed=False)
    assert outcome.problem == ""
    assert {key for row in outcome.data["compared"] for key in row} == {"seq", "difference", "difference_limit"}
    assert len(two_engines.cudas) == 2


@pytest.mark.parametrize("value", [1e3, math.nan])
def test_engines_that_differ_fail(two_engines: Machine, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def spoil(output: np.ndarray) -> None:
        output[0, 0, 0] = value

    def open_runner(engine: Any, settings: RunOptions | None = None) -> TrtRunner:
        return two_engines.open(engine, settings, spoil if engine == two_engines.model.body_engine else None)

    monkeypatch.setattr(latency, "open_runner", open_runner)
    problem = latency.compare_with_bodies(two_engines.model, timed=False).problem
    assert "16 tokens: plugins and bodies differ by" in problem
    assert "63 tokens: plugins and bodies differ by" in problem


def test_without_graphs_the_engines_are_still_compared_and_the_step_fails(two_engines: Machine) -> None:
    two_engines.capture_fails = True
    outcome = latency.compare_with_bodies(two_engines.model, timed=True)
    assert "16 tokens: plugins graph: GraphWarning: a CUDA graph could not be captured" in outcome.problem
    assert "ratio" in outcome.data["compared"][0]
    assert "ratio graph" not in outcome.data["compared"][0]


def test_what_has_no_plugins_is_not_compared(machine: Machine) -> None:
    assert latency.why_not_compared(machine.model) == ""
    rtx = dataclasses.replace(machine.model, target="trt-rtx")
    assert latency.why_not_compared(rtx) == "TensorRT-RTX has no plugins, so the engine has function bodies only"
    machine.write_engine(machine.model.engine, implementation={"LSHSort": "body"})
    assert latency.why_not_compared(machine.model) == "the engine has no plugins"
