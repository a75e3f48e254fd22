"""The goals stage: what it makes of the times of other stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu import goals
from gpu.device import Device
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run

TIMING: dict[str, Any] = {
    "op": "linear_attention",
    "case": "float16 32×8×6000×64",
    "bound_us": 180.0,
    "readings": {"kernel": {"us": 250.0}, "formula": {"us": 1000.0}},
    "goals": [
        {"at_most": 1.4, "reason": "…"},
        {"at_most": 1.3, "reason": "…"},
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
    assert verdicts({**TIMING, "bound_us": None}) == ["not measured", "not measured", "met", "missed"]


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
    tmp_path: Path, readings: dict[str, Any], emulated: bool, status: str
) -> None:
    run = Run(Device(emulated), tmp_path, tmp_path, (), "sources")
    run.write("timing", Result(PASSED, "", {"timings": [{**TIMING, "readings": readings}]}), 0.0)
    run.write("layers", Result(PASSED, "", {"timings": []}), 0.0)
    result = goals.compare(run)
    assert result.status == status
    assert len(result.table.splitlines()) == 5


def test_goals_do_not_pass_with_times_of_other_sources_or_of_a_stage_that_did_not_end(tmp_path: Path) -> None:
    run = Run(Device(emulated=True), tmp_path, tmp_path, (), "sources")
    run.write("timing", Result(PASSED, "", {"timings": [TIMING]}), 0.0)
    run.keep("layers", {"timings": []})
    result = goals.compare(run)
    assert result.status == NOT_RUN
    assert result.summary == "2 met, 2 missed; layers did not pass with these sources on this device"
    assert goals.compare(replace(run, sources="others")).details == {"goals": []}
