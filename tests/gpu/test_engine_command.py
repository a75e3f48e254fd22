"""`scripts/gpu --engines`: options, steps, results and errors, without a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_machine import Machine, series
from gpu import ROOT
from gpu.device import Device
from gpu.engines import command, fresh, model, page, records

from effexport.models.variants import ATTENTION_SPECS


def some_results() -> Any:
    results = records.Results({"GPU": "a GPU"})
    spread = {"median_us": 20.0, "quartile_1_us": 19.0, "quartile_3_us": 22.0}
    eager = {"median_us": 50.0, "quartile_1_us": 49.0, "quartile_3_us": 52.0}
    row = {"seq": 512, "engine": spread, "pytorch": eager, "bound_us": 5.0, "bound_by": "memory"}
    results.leave_out("trt", "", "target", "MissingExtraError: TensorRT is not installed")
    results.run("trt-rtx", "lsh fp16", "latency", lambda: records.Outcome({"rows": [row], "nan": math.nan}))
    soaked = {"samples": series(lambda run: run * 50_000), "runs": 2000, "shapes": 24, "runs_that_differ": 0}
    soaked["runs_wanted"] = 10_000
    soaked["left_after_close_bytes"] = 7
    results.run("trt-rtx", "lsh fp16", "soak", lambda: fresh.judge_soak(soaked))
    return results


def test_markdown_has_every_step_the_latencies_and_the_memory() -> None:
    text = page.markdown_from_results(some_results())
    assert "1 steps passed, 1 failed, 1 were left out." in text
    assert "| trt |  | target | left out | 0.0 | MissingExtraError: TensorRT is not installed |" in text
    times = "20.0 (19.0 to 22.0) | – | 50.0 (49.0 to 52.0) | 2.50 | – | 5.0 (memory) |"
    assert f"| trt-rtx | lsh fp16 | 512 | {times}" in text
    assert "| trt-rtx | lsh fp16 | soak | 2000 of 10000, when the time was up | 24 | 50000 | 2420 | 7 |" in text


def test_json_holds_every_step_and_is_strict() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads(records.json_from_results(some_results()), parse_constant=refuse)
    assert value["machine"] == {"GPU": "a GPU"}
    assert [step["status"] for step in value["steps"]] == ["left out", "passed", "failed"]
    assert value["steps"][1]["data"]["rows"][0]["seq"] == 512


def fail(*given: Any) -> Any:
    raise RuntimeError("the lamp | is\noff")


def soaked(model: Any, engine: Path, wanted: fresh.Soak) -> records.Outcome:
    assert wanted.seconds == math.inf
    return records.Outcome({"engine": str(engine), "runs": wanted.runs, "graphs": wanted.graphs})


def test_a_step_that_fails_is_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    saved: list[int] = []
    results = records.Results({}, lambda found: saved.append(len(found.steps)))
    monkeypatch.setattr(command, "build_artifact", fail)
    monkeypatch.setattr(command, "build_separately", lambda model: records.Outcome())
    for name in ("run_in_fresh_process", "check_parity", "time_artifact", "time_long_sequences"):
        monkeypatch.setattr(command, name, fail)
    for name in ("build_with_bodies", "compare_with_bodies", "compare_second_runner"):
        monkeypatch.setattr(command, name, lambda *given: records.Outcome())
    monkeypatch.setattr(command, "why_no_second_runner", lambda model: "")
    monkeypatch.setattr(command, "soak_in_fresh_process", soaked)
    command.check_model(results, machine.model, command.Call())
    found = {step.name: (step.status, step.text) for step in results.steps}
    failed = ("failed", "RuntimeError: the lamp | is\noff")
    assert found == {
        "build": failed,
        "build without parity of the engine": ("passed", ""),
        "fresh process": failed,
        "parity": failed,
        "second runner": ("passed", ""),
        "latency": failed,
        "latency of long sequences": failed,
        "soak": ("passed", ""),
        "soak with graphs": ("passed", ""),
        "engine with bodies": ("passed", ""),
        "parity with bodies": failed,
        "plugins beside bodies": ("passed", ""),
        "second runner with bodies": ("passed", ""),
        "soak with bodies": ("passed", ""),
    }
    soaks = [(step.name, step.data) for step in results.steps if step.name.startswith("soak")]
    assert soaks == [
        ("soak", {"engine": str(machine.model.engine), "runs": 10_000, "graphs": False}),
        ("soak with graphs", {"engine": str(machine.model.engine), "runs": 10_000, "graphs": True}),
        ("soak with bodies", {"engine": str(machine.model.body_engine), "runs": 10_000, "graphs": False}),
    ]
    assert saved == list(range(1, 15))
    assert results.exit_status == 1
    assert "| RuntimeError: the lamp \\| is off |" in page.markdown_from_results(results)


def test_without_an_engine_the_rest_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    results = records.Results({})
    for name in ("build_artifact", "build_separately"):
        monkeypatch.setattr(command, name, fail)
    command.check_model(results, machine.model, command.Call())
    assert [step.status for step in results.steps] == ["failed"] * 2 + ["left out"] * 8
    assert {step.text for step in results.steps[2:]} == {"the engine was not built"}


def everything_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("build_artifact", "run_in_fresh_process", "check_parity", "time_artifact", "time_long_sequences")
    names += ("build_with_bodies", "compare_with_bodies", "compare_second_runner", "soak_in_fresh_process")
    for name in (*names, "check_decoding"):
        monkeypatch.setattr(command, name, lambda *given: records.Outcome())


def test_without_plugins_or_polygraphy_the_steps_that_need_them_are_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    everything_passes(monkeypatch)
    machine.write_engine(machine.model.engine, implementation={"LSHSort": "body"})
    monkeypatch.setattr(command, "why_no_second_runner", lambda model: "not run: polygraphy is not installed")
    results = records.Results({})
    command.check_model(results, machine.model, command.Call())
    assert {step.name: step.text for step in results.steps if step.status == "left out"} == {
        "second runner": "not run: polygraphy is not installed",
        "engine with bodies": "the engine has no plugins",
    }


def test_after_the_last_minute_no_step_begins(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    everything_passes(monkeypatch)
    results = records.Results({})
    command.check_model(results, machine.model, command.Call(deadline=time.monotonic() - 1))
    assert {(step.status, step.text) for step in results.steps[:2]} == {("left out", "no time was left")}
    assert {step.status for step in results.steps} == {"left out"}


def test_a_causal_model_is_decoded(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    everything_passes(monkeypatch)
    specs = command.specs_from_options(command.parse_options(["--precisions", "fp16"]))
    causal = {spec.attention.variant: spec for spec in specs if spec.attention.causal}
    always = [name for name, spec in ATTENTION_SPECS.items() if spec.why_always_causal]
    added = ["linear", "aft-simple", "window"]
    assert list(causal) == [*always, *added]
    assert len(specs) == len(ATTENTION_SPECS) + len(added)
    steps = [name for name in always if ATTENTION_SPECS[name].causal_state_is_constant]
    assert {"delta", "gated-delta", "retention", "gla", "mamba2"} <= set(steps)
    assert all(causal[name].model.has_decode_step for name in (*steps, *added))
    results = records.Results({})
    command.check_model(results, model.Model("trt", causal["linear"], machine.model.folder), command.Call())
    assert [(step.model, step.name) for step in results.steps] == [
        ("linear causal fp16", name) for name in ("build", "parity", "decoding")
    ]


def test_without_timing_latencies_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    results = records.Results({})
    everything_passes(monkeypatch)
    command.check_model(results, machine.model, command.Call(timed=False))
    assert [step.name for step in results.steps if step.text == "--no-timing was given"] == [
        "latency",
        "latency of long sequences",
    ]
    assert results.exit_status == 0


def test_checks_that_fail_or_do_not_run_are_a_problem() -> None:
    from effexport.proof.check import ALL_CASES, Check

    good, bad = Check("a", ALL_CASES, "m", "passed"), Check("b", ALL_CASES, "error", "failed", 3.0, 1.0)
    idle = Check("a", ALL_CASES, "m", "not run", reason="outside")
    assert model.problem_of_checks([good, idle]) == ""
    assert model.problem_of_checks([good, bad]).startswith(
        "1 of 2 checks failed: b (all cases): error 3.0, at most 1.0"
    )
    assert model.problem_of_checks([idle]) == "no check ran: outside"


@pytest.fixture
def gpu_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "check_setup", lambda self: None)
    monkeypatch.setattr(command, "describe_machine", lambda: {"GPU": "assumed"})


@pytest.mark.usefixtures("gpu_assumed")
def test_without_any_target_the_refusals_are_recorded_and_the_status_is_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert command.main(["-o", str(tmp_path / "results")]) == 2
    steps = json.loads((tmp_path / "results" / "engines.json").read_text())["steps"]
    assert [(step["target"], step["status"]) for step in steps] == [("trt", "left out"), ("trt-rtx", "left out")]
    assert steps[0]["text"].startswith("MissingExtraError: TensorRT is not installed; add it with: pip install")
    assert steps[1]["text"].startswith("MissingExtraError: TensorRT-RTX is not installed; add it with: pip install")
    assert "0 steps passed, 0 failed, 2 were left out." in (tmp_path / "results" / "engines.md").read_text()
    assert "error: neither TensorRT nor TensorRT-RTX can be used here: trt: " in capsys.readouterr().err


@pytest.mark.usefixtures("gpu_assumed")
@pytest.mark.parametrize("arguments", [("--variants", "softmaxx"), ("--precisions", "fp9"), ("--variants", "lsh,")])
def test_unknown_variants_and_precisions_are_one_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --variants or --precisions is wrong: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_clear_error() -> None:
    arguments = [sys.executable, str(ROOT / "scripts" / "gpu"), "--engines"]
    completed = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert completed.stdout == ""
    (line,) = completed.stderr.splitlines()
    assert line.startswith("error: nvidia-smi finds no GPU")
    assert "--rehearse" not in line  # which this command does not have


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort", "rtx")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_is_built_and_what_needs_a_gpu_fails_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SIZE", {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64})
    results = records.Results({})
    wanted = command.parse_options(["--variants", "nystrom", "--precisions", "fp16", "--no-timing"])
    assert model.why_left_out("trt-rtx") == ""
    (spec,) = command.specs_from_options(wanted)
    command.check_model(
        results, model.Model("trt-rtx", spec, tmp_path / "model"), command.Call(timed=False, soak_runs=600)
    )
    steps = {step.name: step for step in results.steps}
    assert steps["build"].status == "passed"
    assert steps["build"].data["implementation"]["IterativePinv"] == "body"
    assert steps["build"].data["element_types"]["float16"] > 0
    for name in ("fresh process", "parity", "soak", "soak with graphs"):
        assert steps[name].status == "failed"
        assert "UserError: CUDA finds no GPU that it can use" in steps[name].text
