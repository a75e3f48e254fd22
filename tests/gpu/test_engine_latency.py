"""Latencies of engines beside PyTorch, on the fake TensorRT and without a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_machine import SEQ_LEN, Machine
from gpu.engines import command, latency

from effexport.base.spec import build_spec_from_options
from effexport.export.module_source import module_from_seed


@pytest.fixture
def no_gpu_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "DEVICE", "cpu")
    ceilings = {"copy": 1e12, "float16": 1e15, "bfloat16": 1e15, "clock": 1e9}
    monkeypatch.setattr(latency, "ceilings", lambda: ceilings)
    properties = SimpleNamespace(multi_processor_count=100, L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # put back after the test


@pytest.mark.usefixtures("no_gpu_to_time")
def test_an_engine_is_timed_plain_as_a_graph_and_beside_pytorch(machine: Machine) -> None:
    outcome = latency.time_engine(machine.model.engine, machine.model, machine.spec, [16, 63])
    assert outcome.problem == ""
    assert [row["seq"] for row in outcome.data["rows"]] == [16, 63]
    for row in outcome.data["rows"]:
        for name in ("engine", "graph", "pytorch"):
            assert 0 < row[name]["quartile_1_us"] <= row[name]["median_us"] <= row[name]["quartile_3_us"]
        assert row["bound_us"] > 0
        assert row["difference"] <= row["difference_limit"]
    plain, graph = machine.cudas
    assert "launch" not in plain.counts
    assert graph.counts["launch"] >= 2 * latency.ROUNDS
    plain.assert_nothing_left()
    graph.assert_nothing_left()


@pytest.mark.usefixtures("no_gpu_to_time")
def test_without_a_graph_the_other_two_are_timed_and_the_step_fails(machine: Machine) -> None:
    machine.capture_fails = True
    outcome = latency.time_engine(machine.model.engine, machine.model, machine.spec, [16])
    assert "16 tokens: graph: GraphWarning: a CUDA graph could not be captured" in outcome.problem
    assert "graph" not in outcome.data["rows"][0]
    assert outcome.data["rows"][0]["engine"]["median_us"] > 0


@pytest.mark.usefixtures("no_gpu_to_time")
def test_a_length_that_fails_does_not_take_the_others_with_it(machine: Machine) -> None:
    outcome = latency.time_engine(machine.model.engine, machine.model, machine.spec, [16, SEQ_LEN + 1])
    assert [row["seq"] for row in outcome.data["rows"]] == [16]
    assert "65 tokens: engine: UserError: the inputs have batch 1, seq 65" in outcome.problem


@pytest.mark.parametrize("value", [1e3, math.nan])
@pytest.mark.usefixtures("no_gpu_to_time")
def test_an_engine_that_is_wrong_is_not_a_fast_one(machine: Machine, value: float) -> None:
    def spoil(output: np.ndarray) -> None:
        output[0, 0, 0] = value

    machine.spoil = spoil
    outcome = latency.time_engine(machine.model.engine, machine.model, machine.spec, [16])
    assert "engine and pytorch differ by" in outcome.problem


@pytest.mark.usefixtures("no_gpu_to_time")
def test_the_floor_counts_linear_layers_once() -> None:
    spec = build_spec_from_options({"variant": "softmax", "dim": 64, "heads": 4, "layers": 2, "seq_len": 64}, None)
    module = module_from_seed(spec)
    # four projections of 64², and two of 64 × 256, per layer
    count = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    halves = {"float16": 1e15, "bfloat16": 1e15}
    # 100 multiprocessors of 128 multiply-adds a clock
    bound = latency.bound_of(module, spec, 1000, {"copy": 1e18, "clock": 1e6, **halves})
    assert bound == {"bound_us": pytest.approx(count * 1000 / 12800), "bound_by": "multiply-adds"}
    moved = 4 * count + 1000 * (16 + 4 * 64)
    bound = latency.bound_of(module, spec, 1000, {"copy": 1e9, "clock": 1e15, **halves})
    assert bound == {"bound_us": pytest.approx(moved / 1e3), "bound_by": "memory"}


def test_the_long_model_is_the_same_with_more_positions() -> None:
    for spec in command.specs_from_options(command.parse_options(["--precisions", "fp16"])):
        longer = latency.long_spec(spec, 16384)
        assert longer.model.seq_len == longer.model.max_seq_len == 16384
        assert (longer.attention.variant, longer.precision, longer.model.layers) == (spec.attention.variant, "fp16", 2)
