"""gpu.stages: what becomes of stages that pass, fail, crash or hang, and what a second run repeats."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ended import has_ended
from gpu import plan
from gpu.carrying import tree_bytes
from gpu.device import Device
from gpu.plan import STAGES, sources_hash
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run, Stage, merged, run_stages
from gpu_stage_examples import run_interruptibly


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "results").mkdir()
    (tmp_path / "work").mkdir()
    ops = ("lsh_sort", "masked_attention")
    return Run(Device(emulated=False), tmp_path / "results", tmp_path / "work", ops, sources="abc")


def example(work: str, seconds: int = 60, processes: int = 0) -> Stage:
    return Stage("example", "", seconds, f"gpu_stage_examples:{work}", processes)


def results_of(run: Run, stage: Stage) -> Result:
    ((_, result, _),) = run_stages(run, [stage])
    return result


def written(run: Run) -> dict:
    return json.loads((run.results / "example.json").read_text(encoding="utf-8"))


def test_a_result_is_written_as_json_without_nan(run: Run) -> None:
    assert results_of(run, example("passes")).status == PASSED
    assert written(run)["summary"] == "2 operators"
    assert written(run)["details"] == {"ops": ["lsh_sort", "masked_attention"], "nan": "nan"}


@pytest.mark.parametrize(
    ("work", "seconds", "summary", "found"),
    [
        ("raises", 60, "ValueError: the first line", 1),
        ("crashes", 60, "its process ended with -9", 2),
        ("hangs", 3, "stopped at its time limit of 3 s", 3),
    ],
)
def test_what_a_failing_stage_had_found_is_kept(run: Run, work: str, seconds: int, summary: str, found: int) -> None:
    result = results_of(run, example(work, seconds))
    assert (result.status, result.summary) == (FAILED, summary)
    assert written(run)["details"]["found"] == found


def test_a_second_run_repeats_what_failed_and_what_other_sources_gave(run: Run) -> None:
    results_of(run, example("raises"))
    assert results_of(run, example("passes")).summary == "2 operators"
    assert results_of(run, example("raises")).summary == "2 operators (earlier run)"
    assert results_of(replace(run, sources="abd"), example("raises")).status == FAILED


@pytest.mark.parametrize("other", [{"hardware": "NVIDIA H200"}, {"ops": ("lsh_sort", "segment_means")}])
def test_a_second_run_repeats_what_another_device_or_other_operators_gave(run: Run, other: dict) -> None:
    results_of(run, example("passes"))
    assert results_of(replace(run, ops=("lsh_sort",)), example("raises")).status == PASSED  # a part of those operators
    assert results_of(replace(run, **other), example("raises")).status == FAILED


@pytest.mark.parametrize("text", ['{"status": "pas', '["passed"]', "{}"])
def test_a_second_run_repeats_a_stage_whose_result_cannot_be_read(run: Run, text: str) -> None:
    (run.results / "example.json").write_text(text)
    assert results_of(run, example("passes")).summary == "2 operators"


def test_the_hash_of_the_sources_depends_on_everything_that_the_stages_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    found = {sources_hash()}
    for name in ("exporter", "plugins", "models", "scripts/gpu", "tests/plugins/native"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
        found.add(sources_hash())
    assert len(found) == 6


def test_what_other_sources_have_built_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("cpu-kernels-1", "cpu-kernels-2", "cpu-artifacts-1", "carried"):
        (tmp_path / name).mkdir()
    plan.remove_outdated(tmp_path / "cpu-kernels-2", "cpu-kernels")
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-kernels-2", "cpu-artifacts-1", "carried"}


def test_every_operator_has_a_process_of_its_own_and_one_failure_fails_the_stage(run: Run) -> None:
    result = results_of(run, example("raises_for_lsh_sort", processes=2))
    assert (result.status, result.summary) == (FAILED, "lsh_sort: ValueError: the first line")
    assert result.details["ops"]["masked_attention"]["ops"] == ["masked_attention"]
    assert [path.name for path in run.results.iterdir()] == ["example.json"]


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_signal_ends_the_stage_and_its_processes_and_keeps_what_they_had_found(
    run: Run, number: int, processes: int
) -> None:
    folder = run.work / "example" / "lsh_sort" if processes else run.results

    only = replace(run, ops=("lsh_sort",))
    stages = [example("hangs", processes=processes), example("passes")]
    # in a process of its own, because a signal to this one would end the tests if a library had changed its handlers
    process = multiprocessing.get_context("spawn").Process(target=run_interruptibly, args=(only, stages))
    process.start()
    while not (folder / "hanging.pid").is_file():
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 0
    ((work, result),), afterwards = pickle.loads((run.work / "outcome").read_bytes())
    assert (work, result.status) == ("gpu_stage_examples:hangs", FAILED)
    assert result.summary.endswith("interrupted")
    details = json.loads((run.work / "interrupted.json").read_text(encoding="utf-8"))["details"]
    assert (details["ops"]["lsh_sort"] if processes else details)["found"] == 3
    assert has_ended(int((folder / "hanging.pid").read_text()))
    assert afterwards.status == PASSED  # the signal is forgotten


def test_a_part_that_did_not_run_is_not_a_success() -> None:
    results = {"a": Result(PASSED, "", {}), "b": Result(NOT_RUN, "no time", {})}
    assert merged(results).status == NOT_RUN


def test_a_stage_is_not_begun_when_no_time_is_left(run: Run) -> None:
    assert results_of(run, example("passes", seconds=0)).status == NOT_RUN


def test_work_that_would_take_as_long_as_the_longest_before_it_is_not_begun(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    run = replace(run, end_before=now + 5)
    begun = []
    for seconds, in_time in run.in_time([1, 3, 0, 0]):
        begun.append(in_time)
        now += seconds
    assert begun == [True, True, False, False]
    assert replace(run, end_before=0.0).seconds_left == 0
    assert [in_time for _, in_time in replace(run, end_before=0.0).in_time([1])] == [False]


def test_what_a_stage_has_started_ends_with_it_in_whatever_process_group(run: Run) -> None:
    assert results_of(run, example("leaves_a_child", seconds=30)).status == PASSED
    assert has_ended(int((run.results / "child.pid").read_text()))


def test_the_plan_keeps_to_nine_minutes_and_twenty_megabytes() -> None:
    assert sum(stage.seconds for stage in STAGES) <= 9 * 60
    assert (tree_bytes() or 0) <= 20e6
    # at most so many files come back from the machine with the GPU
    assert len(STAGES) <= 8
