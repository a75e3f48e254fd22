"""The stages timing, layers and goals, without a GPU and with references in place of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import goals, layers, timing
from gpu.device import Device, KernelError
from gpu.stages import FAILED, NOT_RUN, PASSED, Run
from gpu.stopwatch import readings
from torch import Tensor

from effexport.plugins.gpu_check import Case, load_gpu_check
from effexport.plugins.ops import OPS

EMULATION = Device(emulated=True)
OPERATORS = {op.torch_name: op for op in OPS.values()}


class ReferenceKernels:
    """In place of the library: every operator's reference, and operators that fail."""

    device = EMULATION

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.failing = failing
        self.launched: list[str] = []

    def scratch_bytes(self, op: str, case: Case) -> int:
        return 8

    def launch(self, op: str, case: Case, arrays: Sequence[Tensor], scratch: Tensor) -> None:
        if op in self.failing:
            raise KernelError("the launch failed")
        self.launched.append(op)
        check = load_gpu_check(OPERATORS[op])
        names = check.outputs(case)
        inputs = dict(zip(check.inputs(case, "cpu"), arrays[: -len(names)], strict=True))
        for name, output in zip(names, arrays[-len(names) :], strict=True):
            output.copy_(check.reference(case, inputs)[name])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(EMULATION, tmp_path, tmp_path, tuple(OPERATORS), "sources")


def test_every_timed_case_runs_its_kernel_and_all_baselines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels()
    monkeypatch.setattr(timing, "load_kernels", lambda run: kernels)
    result = timing.time_operators(run)
    assert result.status == PASSED, result.summary
    assert set(kernels.launched) == set(OPERATORS)
    for found in result.details["timings"]:
        assert timing.KERNEL in found["readings"]
        assert {goal["baseline"] for goal in found["goals"] if "baseline" in goal} <= found["readings"].keys()
        assert all(reading["us"] is None for reading in found["readings"].values())


def test_a_kernel_that_fails_is_reported_and_the_others_are_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels(failing=["segment_means"])
    monkeypatch.setattr(timing, "load_kernels", lambda run: kernels)
    result = timing.time_operators(run)
    assert result.status == FAILED
    assert "segment_means" in result.summary
    assert "KernelError: the launch failed" in result.summary
    assert "sequence_conv" in kernels.launched


def test_what_a_stage_had_no_time_for_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "load_kernels", lambda run: ReferenceKernels())
    late = Run(EMULATION, tmp_path, tmp_path, tuple(OPERATORS), "sources", begin_before=0.0)
    result = timing.time_operators(late)
    assert result.status == NOT_RUN
    assert result.summary.startswith("0 of ")


def test_layers_run_with_the_kernels_and_agree_with_pytorch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels()
    monkeypatch.setattr(layers, "load_kernels", lambda run: kernels)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)  # the rehearsal really compiles
    try:
        result = layers.time_layers(run)
    finally:
        withdraw_kernels()
    assert result.status == PASSED, result.summary
    assert set(kernels.launched) == set(layers.CASES)
    assert [found["readings"].keys() for found in result.details["timings"]] == 4 * [
        {"kernel", "eager", "compile", "SDPA"}
    ]


def withdraw_kernels() -> None:
    """Torch operators keep what was registered for a device, so it is switched off for the tests that follow."""
    for name in layers.CASES:
        layers.torch_operator(name)._disabled_kernel.add("cpu")


def test_a_call_that_fails_does_not_stop_the_others() -> None:
    ran = []

    def fail() -> None:
        raise ValueError("no\nsuch kernel")

    found = readings(EMULATION, {"wrong": [fail], "right": [lambda: ran.append(1)] * 3})
    assert found["wrong"]["problem"] == "ValueError: no"
    assert found["right"]["problem"] == ""
    assert len(ran) == 3


TIMING: dict[str, Any] = {
    "op": "linear_attention",
    "case": "float16 32×8×6000×64",
    "bound_us": 180.0,
    "readings": {"kernel": {"us": 250.0}, "formula": {"us": 1000.0}},
    "goals": [
        {"at_most_us": 300, "reason": "…"},
        {"at_most_us": 200, "reason": "…"},
        {"baseline": "formula", "times": 4.0, "reason": "…"},
        {"baseline": "formula", "times": 4.1, "reason": "…"},
    ],
}


def verdicts(timing: dict[str, Any]) -> list[str]:
    return [row["verdict"] for row in goals.rows_of(timing)]


def test_goals_are_met_or_missed() -> None:
    assert verdicts(TIMING) == ["met", "missed", "met", "missed"]
    unmeasured = {"kernel": {"us": None}, "formula": {"us": None}}
    assert verdicts({**TIMING, "readings": unmeasured}) == 4 * ["not measured"]


@pytest.mark.parametrize(
    ("readings", "emulated", "status"),
    [
        (TIMING["readings"], False, PASSED),
        ({"kernel": {"us": None}, "formula": {"us": None}}, False, NOT_RUN),
        ({"kernel": {"us": None}, "formula": {"us": None}}, True, PASSED),
        ({"kernel": {"us": None}}, True, FAILED),  # the baseline is missing
        ({}, True, FAILED),
    ],
)
def test_goals_without_times_do_not_pass_except_in_a_rehearsal(
    tmp_path: Path, readings: dict[str, Any], emulated: bool, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Device(emulated), tmp_path, tmp_path, (), "sources")
    run.keep("timing", {"timings": [{**TIMING, "readings": readings}]})
    assert goals.compare(run).status == status
    assert len(capsys.readouterr().out.splitlines()) == 5
