"""The whole run on a GPU, rehearsed in the emulation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import device
from gpu.plan import ARTIFACT_STAGES, STAGES, print_operators

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu"


# What effexport needs besides PyTorch, and a machine that is lent for its GPU may lack.
ABSENT = (
    "click",
    "google",
    "ml_dtypes",
    "msgspec",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "rich",
    "safetensors",
)


@pytest.fixture
def bare_environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which Python finds PyTorch, but none of the packages above."""
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text("raise ImportError('absent')", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


# one operator of several launches; the soak run rehearses all
@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [["--ops", "lsh_sort"], pytest.param([], marks=pytest.mark.soak)],
    ids=["one", "all"],
)
def test_the_rehearsal_runs_every_stage(only: list[str], bare_environment: dict[str, str]) -> None:
    command = [sys.executable, SCRIPT, "--rehearse", *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bare_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in STAGES:
        assert re.search(rf"^{stage.name} +passed", done.stdout, re.MULTILINE)


@pytest.mark.soak
@pytest.mark.requires("torch", "onnx", "ort")
def test_the_rehearsal_of_the_second_call_runs_every_stage() -> None:
    command = [sys.executable, SCRIPT, "--artifacts", "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ARTIFACT_STAGES:
        assert re.search(rf"^{stage.name} +passed", done.stdout, re.MULTILINE)


def test_the_plan_of_the_second_call_fits_into_one_command() -> None:
    command = [sys.executable, SCRIPT, "--artifacts", "--plan"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(stage.name in done.stdout for stage in ARTIFACT_STAGES)
    assert sum(stage.seconds for stage in ARTIFACT_STAGES) <= 9 * 60


def test_every_stage_can_be_loaded_with_pytorch_alone(bare_environment: dict[str, str]) -> None:
    load = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gpu.plan import STAGES; import pkgutil;"
        "[pkgutil.resolve_name(stage.work) for stage in STAGES];"
        "from effexport.plugins.contract import load_contract; from effexport.plugins.ops import CUDA_OPS;"
        "[load_contract(op) for op in CUDA_OPS.values()]"
    )
    subprocess.run([sys.executable, "-c", load, SCRIPT.parent], check=True, env=bare_environment)


def test_the_plan_names_every_stage_and_the_size() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--plan"], capture_output=True, text=True, check=True)
    assert all(stage.name in done.stdout for stage in STAGES)
    assert "to copy: the tree, " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no folder for the results is given; add -o FOLDER"),
        (["--plan", "--ops", "sort"], "sort: expected some of iterative_pinv"),
        (["--plan", "--stages", "build,cook"], "cook: expected some of build"),
        (["--artifacts", "--plan", "--ops", "lsh_sort"], "leave it out with --artifacts"),
        (["--rehearse", "-o", __file__], f"error: -o {__file__}: expected a folder that can be written"),
    ],
)
def test_wrong_options_end_with_2_and_say_what_is_expected(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_without_a_gpu_the_run_ends_with_2_and_names_the_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "-o", tmp_path / "results"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "error: nvidia-smi finds no GPU" in done.stderr
    assert "--rehearse" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_pytorch_the_plan_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(device.SetupError, match="PyTorch is missing; expected the module torch"):
        print_operators()
