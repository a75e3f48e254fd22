"""scripts/gpu/ort_checks.py without a GPU: the checks run on the CPU provider, pass there, and find planted faults."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import effexport
from effexport import OrtSettings
from effexport.artifact import Artifact
from effexport.errors import KernelWarning
from effexport.runners.ort import runner as ort_runner
from effexport.runners.ort.binding import BoundModel

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu" / "ort_checks.py"
Built = Callable[..., Artifact]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_ort_checks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ort_checks = load_script()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of the checks run on the CPU, with one thread, so that runs of the same shape have the same bits."""

    def opened(artifact: Path, *, implementation: str = "auto", **on_a_gpu: Any) -> ort_runner.OrtRunner:
        assert set(on_a_gpu) <= {"cuda_graph", "device_id"}
        return effexport.load(artifact, OrtSettings(implementation=implementation, threads=1))

    monkeypatch.setattr(ort_checks, "on_cuda", opened)


@pytest.fixture(scope="module", params=[("nystrom", "attention"), ("lsh", "encoder")], ids=lambda p: "-".join(p))
def artifact(built: Built, request: pytest.FixtureRequest) -> Path:
    return built(*request.param).path


def test_a_healthy_artifact_passes(artifact: Path) -> None:
    assert ort_checks.nothing_leaves_the_gpu(artifact)["load_seconds"] > 0
    assert ort_checks.replaying_one_graph_keeps_the_outputs_of_another(artifact) == {}
    assert ort_checks.threads_share_a_session_with_graphs(artifact) == {"threads": 4}


@pytest.mark.requires("native")
def test_implementations_are_compared(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_checks, "TIMED_RUNS", 1)
    facts = ort_checks.kernels_left_out_are_slower(artifact)
    assert set(facts["median_ms"]) == {"auto", "kernel", "body"}


def test_outputs_that_another_graph_overwrites_are_found(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the session's arena would do: a run of one bound model writes over the outputs of the others."""
    run, outputs = BoundModel.run, BoundModel.outputs
    last: list[BoundModel] = []

    def running(self: BoundModel) -> None:
        run(self)
        last[:] = [self]

    def spoiled(self: BoundModel) -> dict[str, np.ndarray]:
        given = outputs(self)
        return given if last[0] is self else {name: value * 0 for name, value in given.items()}

    monkeypatch.setattr(BoundModel, "run", running)
    monkeypatch.setattr(BoundModel, "outputs", spoiled)
    with pytest.raises(ort_checks.CheckError, match="replaying one graph changed the outputs of another"):
        ort_checks.replaying_one_graph_keeps_the_outputs_of_another(artifact)


def test_what_leaves_the_gpu_fails_the_check(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ort_checks.on_cuda

    def warning(artifact: Path) -> ort_runner.OrtRunner:
        warnings.warn(
            "this model leaves the GPU in every run: CumSum 'sum' runs on the CPU", KernelWarning, stacklevel=1
        )
        return opened(artifact)

    monkeypatch.setattr(ort_checks, "on_cuda", warning)
    with pytest.raises(ort_checks.CheckError, match="CumSum 'sum' runs on the CPU"):
        ort_checks.nothing_leaves_the_gpu(artifact)


def test_all_checks_are_listed() -> None:
    checks = [value for value in vars(ort_checks).values() if callable(value) and value.__module__ == "gpu_ort_checks"]
    helpers = {"CheckError", "require", "on_cuda", "feeds_for", "same_bits"}
    assert {check.__name__ for check in checks} - helpers - {"opened"} == {c.__name__ for c in ort_checks.CHECKS}
