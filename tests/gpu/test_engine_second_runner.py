"""Polygraphy as a second runner. TensorRT is a fake here, so Polygraphy is one too: it has the names of the real one,
returns memory that it uses again, and computes what the fake engine computes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_machine import Machine
from gpu.engines import fresh, fresh_process

Spoil = Callable[[int, np.ndarray], np.ndarray]


class FakePolygraphy:
    """spoil: changes what a run answers. chosen: what the environment says when it is imported."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.spoil = machine, lambda run, output: output
        self.shapes: list[tuple[int, ...]] = []
        self.buffer = np.zeros(0, np.float32)

    def engine_from_bytes(self, contents: bytes) -> Callable[[], bytes]:
        assert contents == b"an engine"
        return lambda: contents

    def runner(self, engine: Callable[[], bytes]) -> Any:
        engine()
        return self

    def __enter__(self) -> FakePolygraphy:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def infer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (name, output), *_ = self.machine.compute(feeds).items()
        self.shapes.append(feeds["input_ids"].shape)
        output = self.spoil(len(self.shapes) - 1, output)
        self.buffer = np.resize(self.buffer, max(output.size, self.buffer.size))
        if output.dtype != np.float32:
            return {name: output}
        view = self.buffer[: output.size].reshape(output.shape)
        view[:] = output
        return {name: view}


@pytest.fixture
def polygraphy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> FakePolygraphy:
    fake = FakePolygraphy(machine)
    package = ModuleType("polygraphy")
    package.__version__ = "0.0.fake"  # type: ignore[attr-defined]
    trt = SimpleNamespace(EngineFromBytes=fake.engine_from_bytes, TrtRunner=fake.runner)
    monkeypatch.setitem(sys.modules, "polygraphy", package)
    monkeypatch.setitem(sys.modules, "polygraphy.backend", ModuleType("polygraphy.backend"))
    monkeypatch.setitem(sys.modules, "polygraphy.backend.trt", trt)
    monkeypatch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "")
    monkeypatch.setattr(fresh_process, "open_runner", machine.open)
    return fake


def compare(machine: Machine) -> dict[str, Any]:
    return fresh_process.compare_runners(machine.model.engine, "trt", 258)


def test_one_shape_and_then_changing_shapes_have_the_same_bits(machine: Machine, polygraphy: FakePolygraphy) -> None:
    found = compare(machine)
    assert found["different"] == []
    assert found["runs_of_polygraphy"] == len(polygraphy.shapes) == 15
    assert len(set(polygraphy.shapes[:3])) == 1
    assert len(set(polygraphy.shapes)) == found["shapes"] == 12
    assert found["polygraphy"] == "0.0.fake"
    machine.cudas[0].assert_nothing_left()


def one_bit(output: np.ndarray) -> np.ndarray:
    output.reshape(-1).view(np.int32)[-1] ^= 1
    return output


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda output: one_bit(output), r"has other bits in 1 of \d+ values"),
        (lambda output: output.astype(np.float64), "is float64 .*; expected float32"),
        (lambda output: output[:, :0], "is float32 .*; expected float32"),
    ],
)
def test_one_run_with_other_bits_types_or_shapes_is_named(
    machine: Machine, polygraphy: FakePolygraphy, spoil: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    polygraphy.spoil = lambda run, output: spoil(output) if run == 7 else output
    (text,) = compare(machine)["different"]
    assert text.startswith("run 7 of {'batch': ")
    assert re.search(words, text)


@pytest.mark.usefixtures("polygraphy")
def test_polygraphy_is_told_which_tensorrt_it_is(machine: Machine) -> None:
    for target, value in (("trt-rtx", "1"), ("trt", "0")):
        fresh_process.compare_runners(machine.model.engine, target, 258)
        assert os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] == value


def test_it_runs_in_the_fresh_process_and_a_difference_fails(
    machine: Machine, polygraphy: FakePolygraphy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_process, "REGISTRARS", ())
    monkeypatch.setattr(fresh_process, "import_target", lambda engine: None)

    def start(work: str, engine: Any, folder: Any, **more: Any) -> dict[str, Any]:
        assert fresh_process.fresh_main([str(folder / "report.json"), work, str(engine), json.dumps(more)]) == 0
        return json.loads((folder / "report.json").read_text())

    monkeypatch.setattr(fresh, "start_fresh", start)
    assert fresh.compare_second_runner(machine.model, machine.model.engine).problem == ""
    polygraphy.spoil = lambda run, output: one_bit(output)
    assert "has other bits in" in fresh.compare_second_runner(machine.model, machine.model.engine).problem


def test_without_polygraphy_or_with_bfloat16_the_reason_is_recorded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_process.importlib.util, "find_spec", lambda name: None)
    reason = fresh_process.why_no_second_runner(machine.model)
    assert reason == "not run: polygraphy is not installed; pip install polygraphy"
    monkeypatch.setattr(fresh_process.importlib.util, "find_spec", lambda name: object())
    assert fresh_process.why_no_second_runner(machine.model) == ""
    half = dataclasses.replace(machine.model, spec=dataclasses.replace(machine.spec, precision="bf16"))
    assert fresh_process.why_no_second_runner(half).startswith("not run: Polygraphy returns NumPy arrays")
