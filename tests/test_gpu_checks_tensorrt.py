"""scripts/gpu_checks_tensorrt.py without a GPU; tests/support/fake_tensorrt.py says what its fakes prove."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_tensorrt import FakeCuda, FakeModel, FakeTensorRT

from effexport.engines.sidecar import EngineInfo, write_sidecar
from effexport.export.module_source import module_from_seed
from effexport.proof.cases import Case, save_reference
from effexport.proof.module_runs import run_module
from effexport.runners.trt.runner import TrtRunner, TrtSettings
from effexport.spec import BuildSpec, build_spec_from_options

SCRIPTS = Path(__file__).parents[1] / "scripts"
SEQ_LEN = 64


def load_script() -> ModuleType:
    """As from the folder of scripts, whose files import each other."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("gpu_checks_tensorrt")
    finally:
        sys.path.remove(str(SCRIPTS))


checks = load_script()


def options(*arguments: str) -> argparse.Namespace:
    return checks.gpu_checks.parse_arguments(["--tensorrt", *arguments])


class Machine:
    """A model in an artifact folder with an engine of the fake TensorRT, which computes what PyTorch computes.

    spoil: changes what the engine answers.
    """

    def __init__(self, folder: Path) -> None:
        fields = {"variant": "softmax", "dim": 4, "heads": 1, "layers": 1, "seq_len": SEQ_LEN}
        self.spec: BuildSpec = build_spec_from_options(fields, None)
        self.module = module_from_seed(self.spec)
        self.model = checks.Model("trt", self.spec, folder)
        self.spoil: Callable[[np.ndarray], None] = lambda output: None
        self.cudas: list[FakeCuda] = []
        self.capture_fails = False
        self.model.engine.parent.mkdir(parents=True)
        self.model.engine.write_bytes(b"an engine")
        write_sidecar(self.model.engine, self.info())

    def info(self) -> EngineInfo:
        shapes = ((1, 1), (1, SEQ_LEN), (4, SEQ_LEN))
        return EngineInfo(
            target="trt",
            tensorrt_version="11.4.0.106",
            effexport_version="0.1.0",
            created="2026-01-01T00:00:00+00:00",
            precision="fp32",
            inputs=self.spec.inputs,
            outputs=self.spec.outputs,
            profiles=({"input_ids": shapes, "attention_mask": shapes},),
            options={},
            onnx_sha256="a" * 64,
            onnx_bytes=1,
            engine_sha256=hashlib.sha256(b"an engine").hexdigest(),
            engine_bytes=9,
            build_seconds=1.0,
            compute_capabilities=(90,),
            implementation={"LSHSort": "plugin"},
        )

    def compute(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (output,) = run_module(self.module, self.spec, feeds).values()
        output = output.copy()
        self.spoil(output)
        return {"last_hidden_state": output}

    def open(self, engine: Path, settings: TrtSettings | None = None) -> TrtRunner:
        def output_shapes(shapes: Any) -> dict[str, tuple[int, ...]]:
            return {"last_hidden_state": (*shapes["input_ids"], 4)}

        info = self.info()
        fake = FakeModel(info.inputs, info.outputs, info.profiles, self.compute, output_shapes)
        self.cudas.append(FakeCuda())
        api = FakeTensorRT(fake, self.cudas[-1])
        api.capture_fails = self.capture_fails
        return TrtRunner(engine, settings, cuda=self.cudas[-1], api=api)  # type: ignore[arg-type]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "model")
    monkeypatch.setattr(checks, "open_runner", made.open)
    return made


class LeakyCuda(FakeCuda):
    """Loses memory whenever it is asked."""

    def memory_info(self) -> tuple[int, int]:
        super().memory_info()
        return (1 << 40) - self.counts["memory_info"] * (4 << 20), 1 << 40


# The line through the memory


def series(used: Callable[[int], float], runs: int = 2000) -> list[tuple[int, int]]:
    return [(run, int(used(run))) for run in range(0, runs + 1, 100)]


def noise(amplitude: int) -> Callable[[int], float]:
    generator = random.Random(5)
    return lambda run: generator.uniform(-amplitude, amplitude)


def test_memory_that_stays_the_same_is_no_leak() -> None:
    fit = checks.fit_memory(series(lambda run: 5e9))
    assert fit.problem == ""
    assert fit.bytes_per_run == pytest.approx(0, abs=1e-6)


def test_what_is_taken_at_the_beginning_is_no_leak() -> None:
    assert checks.fit_memory(series(lambda run: 5e9 + min(run, 600) * 1e6)).problem == ""


@pytest.mark.parametrize("at", range(700, 2000, 100))
def test_one_late_allocation_is_no_leak(at: int) -> None:
    assert checks.fit_memory(series(lambda run: 5e9 + (run > at) * checks.GRANULE_BYTES)).problem == ""


@pytest.mark.parametrize("bytes_per_run", [4096, 20_000, 1 << 20])
def test_memory_that_grows_is_a_leak(bytes_per_run: int) -> None:
    fit = checks.fit_memory(series(lambda run: 5e9 + run * bytes_per_run))
    assert fit.bytes_per_run == pytest.approx(bytes_per_run)
    assert f"memory grows by {bytes_per_run} bytes per run" in fit.problem


def test_a_leak_that_shows_in_whole_pieces_is_a_leak() -> None:
    piece = checks.GRANULE_BYTES
    assert "memory grows" in checks.fit_memory(series(lambda run: run * 8000 // piece * piece)).problem


def test_noise_is_no_leak_and_does_not_hide_one() -> None:
    jitter = noise(4 << 20)
    assert checks.fit_memory(series(lambda run: 5e9 + jitter(run))).problem == ""
    assert "memory grows" in checks.fit_memory(series(lambda run: 5e9 + jitter(run) + run * 50_000)).problem


def test_noise_that_could_hide_a_leak_does_not_pass() -> None:
    jitter = noise(1 << 30)
    assert "would not show" in checks.fit_memory(series(lambda run: 5e9 + jitter(run))).problem


def test_more_runs_see_smaller_leaks() -> None:
    short, long = (checks.fit_memory(series(lambda run: run * 500, runs)) for runs in (2000, 20_000))
    assert short.problem == ""
    assert "memory grows by 500" in long.problem


def test_a_fit_that_is_not_a_number_does_not_pass() -> None:
    for values in ((math.nan, 0.0, 1.0), (0.0, math.nan, 1.0)):
        assert checks.MemoryFit(*values).problem


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="run at least 600 times"):
        checks.fit_memory(series(lambda run: 0, runs=300))
    checks.fit_memory(series(lambda run: 0, runs=600))


# Soak


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_a_soak_runs_many_shapes_and_samples_memory(machine: Machine, graphs: bool) -> None:
    with machine.open(machine.model.engine, TrtSettings(cuda_graph=graphs)) as runner:
        found = checks.soak(runner, FakeCuda(), 600, 258)
    assert [run for run, _ in found["samples"]] == [0, 100, 200, 300, 400, 500, 600]
    assert found["shapes"] >= 20
    assert ("capture" in machine.cudas[0].counts) == graphs
    outcome = checks.judge_soak(found)
    assert outcome.problem == ""
    assert outcome.data["fit"]["limit_bytes_per_run"] == pytest.approx(1.5 * (2 << 20) / 300)
    machine.cudas[0].assert_nothing_left()


def test_a_soak_that_leaks_fails(machine: Machine) -> None:
    with machine.open(machine.model.engine) as runner:
        found = checks.soak(runner, LeakyCuda(), 600, 258)
    assert "memory grows by 41943 bytes per run" in checks.judge_soak(found).problem


def test_a_soak_whose_answers_change_fails(machine: Machine) -> None:
    generator = np.random.default_rng(0)

    def spoil(output: np.ndarray) -> None:
        output[0, 0, 0] = generator.standard_normal()

    machine.spoil = spoil
    with machine.open(machine.model.engine) as runner:
        found = checks.soak(runner, FakeCuda(), 600, 258)
    assert found["runs_that_differ"] == 600 - checks.SHAPES
    assert "gave other bits" in checks.judge_soak(found).problem


def test_the_shapes_of_a_soak_are_distinct_and_within_the_profile(machine: Machine) -> None:
    with machine.open(machine.model.engine) as runner:
        sizes = checks.random_sizes(runner, 24, np.random.default_rng(0))
        everything = checks.random_sizes(runner, 10_000, np.random.default_rng(0))
    assert len({tuple(size.values()) for size in sizes}) == 24
    assert {"batch": 1, "seq": 1} in sizes
    assert {"batch": 4, "seq": SEQ_LEN} in sizes
    assert all(1 <= size["batch"] <= 4 and 1 <= size["seq"] <= SEQ_LEN for size in everything)
    assert len(everything) == 4 * SEQ_LEN


# The fresh process


def tensorrt_that_knows(*creators: tuple[str, str]) -> SimpleNamespace:
    """name and namespace of each plugin"""
    known = [SimpleNamespace(name=name, plugin_namespace=namespace) for name, namespace in creators]
    return SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(all_creators=known))


def test_the_fresh_process_refuses_what_could_register_plugins() -> None:
    checks.require_no_plugins({"effexport.plugins": None, "tensorrt_rtx": None})
    for name in checks.REGISTRARS:
        with pytest.raises(RuntimeError, match=f"{name} is loaded in the fresh process"):
            checks.require_no_plugins({name: None})


def test_the_fresh_process_refuses_plugins_of_ours_and_no_others() -> None:
    checks.require_no_plugins({"tensorrt": tensorrt_that_knows(("LSHSort", ""), ("Lamp", "lamps"))})
    with pytest.raises(RuntimeError, match="knows plugins of effexport in the fresh process: LSHSort"):
        checks.require_no_plugins({"tensorrt": tensorrt_that_knows(("Lamp", ""), ("LSHSort", "effexport"))})


def test_the_fresh_process_loads_no_framework_and_says_what_is_wrong(tmp_path: Path) -> None:
    code = (
        "import sys; import gpu_checks_tensorrt as script; status = script.fresh_main(sys.argv[1:]); "
        "loaded = {'torch', 'onnx', *script.REGISTRARS} & set(sys.modules); print(loaded or 'none'); sys.exit(status)"
    )
    arguments = ["--report", tmp_path / "report.json", "soak", tmp_path / "trt.engine", "--runs", "9"]
    command = [sys.executable, "-c", code, *map(str, arguments), "--index-limit", "9"]
    completed = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert completed.returncode == 1
    assert completed.stdout.strip() == "none"
    assert completed.stderr.startswith(f"UserError: no engine at {tmp_path / 'trt.engine'}")


def test_the_words_of_a_fresh_process_that_fails_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with status 1: UserError: no engine at .*trt\.engine"):
        checks.start_fresh(["soak", str(tmp_path / "trt.engine"), "--runs", "9", "--index-limit", "9"], tmp_path)


def test_a_fresh_process_that_crashes_is_named_by_its_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    died = subprocess.CompletedProcess([], -11, "", "last words")
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: died)
    with pytest.raises(RuntimeError, match="ended with signal SIGSEGV: last words"):
        checks.start_fresh(["soak"], tmp_path)


def write_cases(machine: Machine) -> None:
    """One case within the profile, and one that is too long for it."""
    cases = []
    for name, shape in (("export", (2, 63)), ("longer", (1, SEQ_LEN + 1))):
        ids = np.random.default_rng(1).integers(0, 258, shape)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        kept = {key: value[:, :SEQ_LEN] for key, value in inputs.items()}
        cases.append(Case(name, inputs, run_module(machine.module, machine.spec, kept)))
    save_reference(cases, machine.model.artifact / "reference.safetensors")


@pytest.fixture
def in_this_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh process is this one, where PyTorch and pytest are, so its guard looks at nothing."""
    write_cases(machine)
    monkeypatch.setattr(checks, "REGISTRARS", ())
    monkeypatch.setattr(checks, "import_target", lambda engine: None)

    def start(arguments: list[str], folder: Path) -> dict[str, Any]:
        report = folder / "report.json"
        assert checks.fresh_main(["--report", str(report), *arguments]) == 0
        return json.loads(report.read_text())

    monkeypatch.setattr(checks, "start_fresh", start)


@pytest.mark.usefixtures("in_this_process")
def test_outputs_of_the_fresh_process_are_compared_with_the_reference(machine: Machine) -> None:
    outcome = checks.run_in_fresh_process(machine.model)
    assert outcome.problem == ""
    assert outcome.data["cases"] == 1, "the profile does not cover the other"
    assert outcome.data["implementation"] == {"LSHSort": "plugin"}
    assert outcome.data["summary"]["arithmetic"]["passed"] == 1
    machine.cudas[0].assert_nothing_left()


@pytest.mark.parametrize("value", [1e3, math.nan, math.inf])
@pytest.mark.usefixtures("in_this_process")
def test_one_wrong_value_of_the_fresh_process_fails(machine: Machine, value: float) -> None:
    def spoil(output: np.ndarray) -> None:
        output[-1, -1, -1] = value

    machine.spoil = spoil
    assert "checks failed: " in checks.run_in_fresh_process(machine.model).problem


# Latency


@pytest.fixture
def no_gpu_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.gpu_checks, "DEVICE", "cpu")
    monkeypatch.setattr(checks.gpu_checks, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(checks, "product_rate", lambda dtype_name: 1e15)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # put back after the test


@pytest.mark.usefixtures("no_gpu_to_time")
def test_an_engine_is_timed_plain_as_a_graph_and_beside_pytorch(machine: Machine) -> None:
    outcome = checks.time_engine(machine.model.engine, machine.model, machine.spec, [16, 63])
    assert outcome.problem == ""
    assert [row["seq"] for row in outcome.data["rows"]] == [16, 63]
    for row in outcome.data["rows"]:
        for name in ("engine", "graph", "pytorch"):
            assert 0 < row[name]["quartile_1_us"] <= row[name]["median_us"] <= row[name]["quartile_3_us"]
        assert row["floor_us"] > 0
        assert row["difference"] <= row["difference_limit"]
    plain, graph = machine.cudas
    assert "launch" not in plain.counts
    assert graph.counts["launch"] >= 2 * checks.gpu_checks.ROUNDS
    plain.assert_nothing_left()
    graph.assert_nothing_left()


@pytest.mark.usefixtures("no_gpu_to_time")
def test_without_a_graph_the_other_two_are_timed_and_the_step_fails(machine: Machine) -> None:
    machine.capture_fails = True
    outcome = checks.time_engine(machine.model.engine, machine.model, machine.spec, [16])
    assert "16 tokens: with a CUDA graph: GraphWarning: a CUDA graph could not be captured" in outcome.problem
    assert "graph" not in outcome.data["rows"][0]
    assert outcome.data["rows"][0]["engine"]["median_us"] > 0


@pytest.mark.usefixtures("no_gpu_to_time")
def test_a_length_that_fails_does_not_take_the_others_with_it(machine: Machine) -> None:
    outcome = checks.time_engine(machine.model.engine, machine.model, machine.spec, [16, SEQ_LEN + 1])
    assert [row["seq"] for row in outcome.data["rows"]] == [16]
    assert "65 tokens: UserError: the inputs have batch 1, seq 65" in outcome.problem


@pytest.mark.parametrize("value", [1e3, math.nan])
@pytest.mark.usefixtures("no_gpu_to_time")
def test_an_engine_that_is_wrong_is_not_a_fast_one(machine: Machine, value: float) -> None:
    def spoil(output: np.ndarray) -> None:
        output[0, 0, 0] = value

    machine.spoil = spoil
    outcome = checks.time_engine(machine.model.engine, machine.model, machine.spec, [16])
    assert "the engine differs from PyTorch" in outcome.problem


def test_the_floor_counts_linear_layers_once() -> None:
    spec = build_spec_from_options({"variant": "softmax", "dim": 64, "heads": 4, "layers": 2, "seq_len": 64}, None)
    module = module_from_seed(spec)
    # four projections of 64², and two of 64 × 256, per layer
    count = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    rates = {"product_tflops": 1.0, "copy_gb_per_s": 1e9}
    assert checks.floor_of(module, spec, 1000, rates) == (pytest.approx(2 * count * 1000 / 1e6), "arithmetic")
    rates = {"product_tflops": 1e9, "copy_gb_per_s": 1.0}
    moved = 4 * count + 1000 * (16 + 4 * 64)
    assert checks.floor_of(module, spec, 1000, rates) == (pytest.approx(moved / 1e3), "memory")


def test_the_long_model_is_the_same_with_more_positions() -> None:
    for spec in checks.specs_from_options(options("--precisions", "fp16")):
        longer = checks.long_spec(spec, 16384)
        assert longer.seq_len == longer.max_seq_len == 16384
        assert (longer.variant, longer.precision, longer.model.layers) == (spec.variant, "fp16", 2)


# Steps, results and errors


def some_results() -> Any:
    results = checks.Results({"GPU": "a GPU"})
    spread = {"median_us": 20.0, "quartile_1_us": 19.0, "quartile_3_us": 22.0}
    eager = {"median_us": 50.0, "quartile_1_us": 49.0, "quartile_3_us": 52.0}
    row = {"seq": 512, "engine": spread, "pytorch": eager, "floor_us": 5.0, "limited_by": "memory"}
    results.leave_out("trt", "", "target", "MissingExtraError: TensorRT is not installed")
    results.run("trt-rtx", "lsh fp16", "latency", lambda: checks.Outcome({"rows": [row], "nan": math.nan}))
    soaked = {"samples": series(lambda run: run * 50_000), "runs": 2000, "shapes": 24, "runs_that_differ": 0}
    soaked["left_after_close_bytes"] = 7
    results.run("trt-rtx", "lsh fp16", "soak", lambda: checks.judge_soak(soaked))
    return results


def test_markdown_has_every_step_the_latencies_and_the_memory() -> None:
    text = checks.markdown_from_results(some_results())
    assert "1 steps passed, 1 failed, 1 were left out." in text
    assert "| trt |  | target | left out | 0.0 | MissingExtraError: TensorRT is not installed |" in text
    times = "20.0 (19.0 to 22.0) | – | 50.0 (49.0 to 52.0) | 2.50 | – | 5.0 (memory) |"
    assert f"| trt-rtx | lsh fp16 | 512 | {times}" in text
    assert "| trt-rtx | lsh fp16 | soak | 2000 | 24 | 50000 | 2420 | 7 |" in text


def test_json_holds_every_step_and_is_strict() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads(checks.json_from_results(some_results()), parse_constant=refuse)
    assert value["machine"] == {"GPU": "a GPU"}
    assert [step["status"] for step in value["steps"]] == ["left out", "passed", "failed"]
    assert value["steps"][1]["data"]["rows"][0]["seq"] == 512


def fail(model: Any) -> Any:
    raise RuntimeError("the lamp | is\noff")


def test_a_step_that_fails_is_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    saved: list[int] = []
    results = checks.Results({}, lambda found: saved.append(len(found.steps)))
    monkeypatch.setattr(checks, "build_artifact", fail)
    monkeypatch.setattr(checks, "build_separately", lambda model: checks.Outcome())
    for name in ("run_in_fresh_process", "check_parity", "time_artifact", "time_long_sequences"):
        monkeypatch.setattr(checks, name, fail)
    monkeypatch.setattr(checks, "soak_in_fresh_process", lambda model, runs, graphs: checks.Outcome({"graphs": graphs}))
    checks.check_model(results, machine.model, options())
    found = {step.name: (step.status, step.text) for step in results.steps}
    failed = ("failed", "RuntimeError: the lamp | is\noff")
    assert found == {
        "build": failed,
        "build without parity of the engine": ("passed", ""),
        "fresh process": failed,
        "parity": failed,
        "latency": failed,
        "latency of long sequences": failed,
        "soak": ("passed", ""),
        "soak with graphs": ("passed", ""),
    }
    assert saved == list(range(1, 9))
    assert results.exit_status == 1
    assert "| RuntimeError: the lamp \\| is off |" in checks.markdown_from_results(results)


def test_without_an_engine_the_rest_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    results = checks.Results({})
    for name in ("build_artifact", "build_separately"):
        monkeypatch.setattr(checks, name, fail)
    checks.check_model(results, machine.model, options())
    assert [step.status for step in results.steps] == ["failed"] * 2 + ["left out"] * 6
    assert {step.text for step in results.steps[2:]} == {"the engine was not built"}


def test_without_timing_latencies_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    results = checks.Results({})
    for name in ("build_artifact", "run_in_fresh_process", "check_parity"):
        monkeypatch.setattr(checks, name, lambda model: checks.Outcome())
    monkeypatch.setattr(checks, "soak_in_fresh_process", lambda model, runs, graphs: checks.Outcome())
    checks.check_model(results, machine.model, options("--no-timing"))
    assert [step.name for step in results.steps if step.text == "--no-timing was given"] == [
        "latency",
        "latency of long sequences",
    ]
    assert results.exit_status == 0


def test_checks_that_fail_or_do_not_run_are_a_problem() -> None:
    from effexport.proof.case_label import ALL_CASES
    from effexport.proof.checks.result import Check

    good, bad = Check("a", ALL_CASES, "m", "passed"), Check("b", ALL_CASES, "error", "failed", 3.0, 1.0)
    idle = Check("a", ALL_CASES, "m", "not run", reason="outside")
    assert checks.problem_of_checks([good, idle]) == ""
    assert checks.problem_of_checks([good, bad]).startswith(
        "1 of 2 checks failed: b (all cases): error 3.0, at most 1.0"
    )
    assert checks.problem_of_checks([idle]) == "no check ran: outside"


@pytest.fixture
def gpu_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.gpu_checks, "require_gpu", lambda: None)
    monkeypatch.setattr(checks, "describe_machine", lambda: {"GPU": "assumed"})


@pytest.mark.usefixtures("gpu_assumed")
def test_without_any_target_the_refusals_are_recorded_and_the_status_is_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    files = [tmp_path / "results.json", tmp_path / "results.md"]
    assert checks.main(options("--output-json", str(files[0]), "--output-markdown", str(files[1]))) == 2
    steps = json.loads(files[0].read_text())["steps"]
    assert [(step["target"], step["status"]) for step in steps] == [("trt", "left out"), ("trt-rtx", "left out")]
    assert steps[0]["text"].startswith("MissingExtraError: TensorRT is not installed; add it with: pip install")
    assert steps[1]["text"].startswith("MissingExtraError: TensorRT-RTX is not installed; add it with: pip install")
    assert "0 steps passed, 0 failed, 2 were left out." in files[1].read_text()
    assert "error: neither TensorRT nor TensorRT-RTX can be used here: trt: " in capsys.readouterr().err


@pytest.mark.usefixtures("gpu_assumed")
@pytest.mark.parametrize("arguments", [("--variants", "softmaxx"), ("--precisions", "fp8"), ("--variants", "lsh,")])
def test_unknown_variants_and_precisions_are_one_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert checks.main(options(*arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --variants or --precisions is wrong: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_clear_error() -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_checks.py"), "--tensorrt"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert completed.stdout == ""
    (line,) = completed.stderr.splitlines()
    assert line.startswith("error: PyTorch ")


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort", "rtx")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_is_built_and_what_needs_a_gpu_fails_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SIZE", {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64})
    results = checks.Results({})
    wanted = options("--variants", "nystrom", "--precisions", "fp16", "--no-timing")
    assert checks.why_left_out("trt-rtx") == ""
    (spec,) = checks.specs_from_options(wanted)
    checks.check_model(results, checks.Model("trt-rtx", spec, tmp_path / "model"), wanted)
    steps = {step.name: step for step in results.steps}
    assert steps["build"].status == "passed"
    assert steps["build"].data["implementation"]["IterativePinv"] == "body"
    assert steps["build"].data["element_types"]["float16"] > 0
    for name in ("fresh process", "parity", "soak", "soak with graphs"):
        assert steps[name].status == "failed"
        assert "UserError: CUDA finds no GPU that it can use" in steps[name].text


# Wheels


def make_wheel(folder: Path) -> Path:
    path = folder / "carried_part-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("carried_part.py", "answer = 42\n")
        wheel.writestr(
            "carried_part-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried-part\nVersion: 1.0\n"
        )
        wheel.writestr(
            "carried_part-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("carried_part-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder with a wheel in three parts, and one to work in."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    folder, work = tmp_path / "wheels", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    wheel = make_wheel(folder)
    contents = wheel.read_bytes()
    for index, suffix in enumerate(("aa", "ab", "ac")):
        third = -(-len(contents) // 3)
        Path(f"{wheel}.part{suffix}").write_bytes(contents[index * third : (index + 1) * third])
    wheel.unlink()
    return folder, work


def test_parts_of_wheels_are_joined_and_installed_for_this_run(carried: tuple[Path, Path]) -> None:
    checks.install_wheels(*carried)
    command = [sys.executable, "-c", "import carried_part; print(carried_part.answer)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42\n"
    assert importlib.util.find_spec("carried_part") is not None


def test_a_missing_part_of_a_wheel_is_named(carried: tuple[Path, Path]) -> None:
    next(carried[0].glob("*.partac")).unlink()
    with pytest.raises(checks.gpu_checks.SetupError, match=r"carried_part-1\.0-py3-none-any\.whl is incomplete"):
        checks.install_wheels(*carried)


def test_a_folder_without_wheels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(checks.gpu_checks.SetupError, match="expected wheels"):
        checks.install_wheels(tmp_path, tmp_path)


def test_a_wheel_for_another_python_is_an_error_in_the_words_of_pip(tmp_path: Path) -> None:
    make_wheel(tmp_path).rename(tmp_path / "carried_part-1.0-cp27-none-any.whl")
    with pytest.raises(checks.gpu_checks.SetupError, match="not a supported wheel"):
        checks.install_wheels(tmp_path, tmp_path)
