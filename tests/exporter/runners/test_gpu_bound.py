"""scripts/gpu/bound.py without a GPU: its checks pass on a healthy artifact, and find planted faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu import bound as gpu_bound

from effexport.artifact import Artifact
from effexport.base.errors import KernelWarning
from effexport.runners.ort import runner as ort_runner
from effexport.runners.ort.runner import BoundModel

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


@pytest.fixture(scope="module")
def artifact(built: Callable[..., Artifact]) -> Path:
    return built("nystrom", "attention").path


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bound, "RUNS_PER_THREAD", 2)
    monkeypatch.setattr(gpu_bound, "TIMED_RUNS", 1)


@pytest.mark.parametrize("check", gpu_bound.CHECKS, ids=lambda check: str(check.__name__))
def test_a_healthy_artifact_passes(artifact: Path, check: gpu_bound.Check) -> None:
    assert gpu_bound.problem_of(check, artifact, "ort") == ""


def test_outputs_that_another_run_overwrites_are_found(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If outputs lie in the session's arena, a replay of one bound model changes those of another."""
    run, outputs = BoundModel.run, BoundModel.outputs
    last: list[BoundModel] = []

    def running(self: BoundModel) -> None:
        run(self)
        last[:] = [self]

    def overwritten(self: BoundModel) -> dict[str, np.ndarray]:
        return {name: value if last == [self] else value * 0 for name, value in outputs(self).items()}

    monkeypatch.setattr(BoundModel, "run", running)
    monkeypatch.setattr(BoundModel, "outputs", overwritten)
    problem = gpu_bound.problem_of(gpu_bound.a_graph_leaves_other_outputs_alone, artifact, "ort")
    assert "outputs of the other shape after a replay" in problem


def test_what_leaves_the_gpu_is_found(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ort_runner.session_from_model

    def warning(*args: Any, **more: Any) -> Any:
        warnings.warn("this model leaves the GPU in every run: Pad 'p' runs on the CPU", KernelWarning, stacklevel=1)
        return opened(*args, **more)

    monkeypatch.setattr(ort_runner, "session_from_model", warning)
    problem = gpu_bound.problem_of(gpu_bound.the_whole_model_runs_on_the_device, artifact, "ort")
    assert "Pad 'p' runs on the CPU" in problem
