"""Engines in a process of their own, whose outputs are compared with the reference."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_machine import SEQ_LEN, Machine
from gpu import ROOT
from gpu.engines import fresh, fresh_process

from effexport.proof.cases import Case, save_reference
from effexport.proof.module_runs import run_module


def tensorrt_that_knows(*creators: tuple[str, str]) -> SimpleNamespace:
    """name and namespace of each plugin"""
    known = [SimpleNamespace(name=name, plugin_namespace=namespace) for name, namespace in creators]
    return SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(all_creators=known))


def test_the_fresh_process_refuses_what_could_register_plugins() -> None:
    fresh_process.require_no_plugins({"effexport.plugins": None, "tensorrt_rtx": None})
    for name in fresh_process.REGISTRARS:
        with pytest.raises(RuntimeError, match=f"{name} is loaded in the fresh process"):
            fresh_process.require_no_plugins({name: None})


def test_the_fresh_process_refuses_plugins_of_ours_and_no_others() -> None:
    fresh_process.require_no_plugins({"tensorrt": tensorrt_that_knows(("LSHSort", ""), ("Lamp", "lamps"))})
    with pytest.raises(RuntimeError, match="knows plugins of effexport in the fresh process: LSHSort"):
        fresh_process.require_no_plugins({"tensorrt": tensorrt_that_knows(("Lamp", ""), ("LSHSort", "effexport"))})


def test_the_fresh_process_loads_no_framework_and_says_what_is_wrong(tmp_path: Path) -> None:
    code = (
        "import sys; from gpu.engines import fresh_process as script; status = script.fresh_main(sys.argv[1:]); "
        "loaded = {'torch', 'onnx', *script.REGISTRARS} & set(sys.modules); print(loaded or 'none'); sys.exit(status)"
    )
    arguments = [tmp_path / "report.json", "second-runner", tmp_path / "trt.engine", '{"index_limit": 9}']
    command = [sys.executable, "-c", code, *map(str, arguments)]
    completed = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=False)
    assert completed.returncode == 1
    assert completed.stdout.strip() == "none"
    assert completed.stderr.startswith(f"UserError: no engine at {tmp_path / 'trt.engine'}")


def test_the_words_of_a_fresh_process_that_fails_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with status 1: UserError: no engine at .*trt\.engine"):
        fresh.start_fresh("second-runner", tmp_path / "trt.engine", tmp_path, index_limit=9)


def test_a_fresh_process_that_crashes_is_named_by_its_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    died = subprocess.CompletedProcess([], -11, "", "last words")
    monkeypatch.setattr(fresh.subprocess, "run", lambda *_, **__: died)
    with pytest.raises(RuntimeError, match="ended with signal SIGSEGV: last words"):
        fresh.start_fresh("soak", tmp_path / "trt.engine", tmp_path)


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
    monkeypatch.setattr(fresh_process, "REGISTRARS", ())
    monkeypatch.setattr(fresh_process, "import_target", lambda engine: None)

    def start(work: str, engine: Path, folder: Path, **arguments: Any) -> dict[str, Any]:
        report = folder / "report.json"
        assert fresh_process.fresh_main([str(report), work, str(engine), json.dumps(arguments)]) == 0
        return json.loads(report.read_text())

    monkeypatch.setattr(fresh, "start_fresh", start)


@pytest.mark.usefixtures("in_this_process")
def test_outputs_of_the_fresh_process_are_compared_with_the_reference(machine: Machine) -> None:
    outcome = fresh.run_in_fresh_process(machine.model)
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
    assert "checks failed: " in fresh.run_in_fresh_process(machine.model).problem
