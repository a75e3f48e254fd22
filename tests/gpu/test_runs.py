"""docs/platforms.md says what has run on a GPU, and takes it from committed results alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gpu import runs
from gpu.device import Device
from gpu.plan import ARTIFACT_STAGES, STAGES
from gpu.stages import PASSED, Result, Run


def test_the_page_says_what_the_results_say() -> None:
    assert runs.PAGE.read_text(encoding="utf-8") == runs.page(), "stale; run python3 scripts/gpu/runs.py"


def test_every_path_names_results_that_exist_or_says_that_there_are_none() -> None:
    text = runs.PAGE.read_text(encoding="utf-8")
    lines = [line for line in text[: text.index("### On a GPU")].splitlines() if line.startswith("| ")]
    rows = [line.split("|")[3:5] for line in lines]
    assert len(rows) > 15
    for ran, results in rows[1:]:
        links = re.findall(r"\]\(([^)#]+)\)", results)
        assert all((runs.PAGE.parent / link).exists() for link in links), results
        assert links or "(#on-a-gpu)" in ran, ran
        assert "every change" in ran or "never" in ran or re.search(r"\d{4}-\d\d-\d\d", ran), ran


def test_every_stage_of_a_path_exists() -> None:
    known = {stage.name for stage in (*STAGES, *ARTIFACT_STAGES)} | {"engines"}
    assert {stage for stages in runs.PATHS.values() for stage in stages} <= known


def test_a_path_without_results_has_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "nowhere")
    lines = runs.table().splitlines()[2:]
    assert lines
    assert all(line.endswith("| never | – | – | no results |") for line in lines)


def test_results_are_listed_with_their_gpu_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    folder = tmp_path / "2026-01-02-h100"
    folder.mkdir()
    run = Run(Device(emulated=False), folder, folder, (), "sources", hardware="NVIDIA H100")
    run.write("correctness", Result(PASSED, "500 of 500 cases", {}), 1.0)
    date = json.loads((folder / "correctness.json").read_text())["date"]
    engines = {
        "machine": {"date": "2026-01-02", "device": "NVIDIA L4"},
        "steps": [{"status": "passed"}, {"status": "failed"}, {"status": "passed"}],
    }
    (folder / "engines.json").write_text(json.dumps(engines), encoding="utf-8")
    table = runs.table()
    assert f"| correctness | {date} | NVIDIA H100 | sources | passed: 500 of 500 cases |" in table
    assert "| engines | 2026-01-02 | NVIDIA L4 | – | 2 passed, 1 failed |" in table
    assert "| sanitizing | never |" in table
