"""The stages of the second call on a GPU: what counts as passed, and where CUDA's libraries are found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu import artifacts, carrying
from gpu.device import Device, SetupError
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run


def make_run(folder: Path, *, emulated: bool = True, end_before: float = float("inf")) -> Run:
    return Run(Device(emulated), folder, folder / "work", (), "sources", end_before)


def completed(status: int, stdout: str, stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], status, stdout, stderr)


def test_one_failed_row_fails_the_stage_and_all_rows_are_kept(tmp_path: Path) -> None:
    def hang() -> dict[str, Any]:
        raise subprocess.TimeoutExpired("effexport", 120)

    jobs = {"good": lambda: {"passed": True}, "bad": lambda: {"passed": False, "problem": "wrong"}, "hanging": hang}
    result = artifacts.all_of(make_run(tmp_path), "verify", jobs)
    assert result.status == FAILED
    assert result.summary == "1 of 3 passed; not: bad, hanging"
    kept = json.loads((tmp_path / "verify.json").read_text())["details"]["rows"]
    assert kept.keys() == jobs.keys()
    assert kept["hanging"]["problem"] == "no time was left"


def test_rows_pass_only_if_there_are_some_and_time_is_left(tmp_path: Path) -> None:
    jobs = {"good": lambda: {"passed": True}}
    assert artifacts.all_of(make_run(tmp_path), "verify", jobs).status == PASSED
    assert artifacts.all_of(make_run(tmp_path), "verify", {}).status == FAILED
    late = artifacts.all_of(make_run(tmp_path, end_before=0.0), "verify", jobs)
    assert (late.status, late.details["rows"]["good"]["problem"]) == (NOT_RUN, "no time was left")


@pytest.mark.parametrize(
    ("done", "passed", "problem"),
    [
        (completed(0, '{"verdict": "passed"}', "a warning"), True, ""),
        (completed(1, '{"verdict": "failed"}', "arithmetic: 3 of 5"), False, "arithmetic: 3 of 5"),
        (completed(0, "not JSON"), False, "no JSON but 'not JSON'"),
        (completed(-11, "", "Segmentation fault"), False, "Segmentation fault"),
    ],
)
def test_a_process_passes_if_it_says_so_and_writes_json(
    done: subprocess.CompletedProcess[str], passed: bool, problem: str
) -> None:
    row = artifacts.row_of(done, ("verdict",))
    assert (row["passed"], row["problem"]) == (passed, problem)


def bench_row(**fields: Any) -> dict[str, Any]:
    case = {"label": "lsh", "precision": "fp16", "seq_len": 2048, "runtime": "ort-cuda"}
    good = {"passed": True, "metric": "m", "value": 1.0, "limit": 2.0}
    return {"case": case, "status": "measured", "reason": "", "parity": good, "timing": {"median_ms": 1.0}, **fields}


def test_rows_of_a_benchmark_without_a_timing_or_with_a_wrong_result_are_named() -> None:
    wrong = {"passed": False, "metric": "max |error|", "value": 9.0, "limit": 1.0}
    missing = bench_row(status="not run", reason="no GPU", timing=None, parity=None)
    assert artifacts.problems_of_rows([bench_row(), bench_row(parity=wrong), missing]) == [
        "lsh fp16 2048 ort-cuda: max |error| 9.0, at most 1.0",
        "lsh fp16 2048 ort-cuda: not run, no GPU",
    ]


@pytest.mark.parametrize("stage", [artifacts.verify, artifacts.bound, artifacts.bench])
def test_a_stage_that_finds_nothing_installed_says_what_to_run(tmp_path: Path, stage: Callable[[Run], Result]) -> None:
    result = stage(make_run(tmp_path))
    assert result.status == FAILED
    assert result.summary == f"{tmp_path / 'work' / 'artifacts'} does not exist; run the stage install too"


def test_without_what_has_to_be_carried_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "CARRIED", tmp_path)
    with pytest.raises(
        SetupError, match="lacks the artifacts or the kernel library; fill it with `scripts/gpu --carry"
    ):
        artifacts.place_of(make_run(tmp_path, emulated=False))


def test_processes_on_the_gpu_get_the_carried_packages_and_the_libraries_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "packages" / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    artifacts.cuda_folders.cache_clear()
    try:
        place = artifacts.Place(tmp_path, "ort-cuda", tmp_path / "site", tmp_path / "lib.so")
        environment = place.environment
    finally:
        artifacts.cuda_folders.cache_clear()
    assert environment["PYTHONPATH"].startswith(f"{tmp_path / 'site'}:")
    assert environment["EFFEXPORT_LIBRARY"] == str(tmp_path / "lib.so")
    assert str(library.parent) in environment["LD_LIBRARY_PATH"].split(":")


def test_every_variant_is_carried() -> None:
    from effexport.models.variants import ATTENTION_SPECS

    assert carrying.variants() == tuple(ATTENTION_SPECS)
