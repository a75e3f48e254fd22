"""The table of runtimes: every row has the module that opens it and the extra that installs it."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from effexport.environment import PACKAGES
from effexport.runtimes import ARTIFACT_RUNTIMES, RUNTIMES, TORCH_OF_DEVICE, Runtime

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXTRAS = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("runtime", ARTIFACT_RUNTIMES.values(), ids=lambda runtime: str(runtime.name))
def test_a_runtime_for_artifacts_has_a_module_that_opens_them(runtime: Runtime) -> None:
    module = importlib.import_module(f"effexport.{runtime.folder.replace('/', '.')}.runner")
    assert hasattr(module, "open_engine" if runtime.engine else "open_model")
    assert runtime.platform


def test_names_and_labels_are_unique_and_packages_have_extras() -> None:
    assert len({runtime.label for runtime in RUNTIMES.values()}) == len(RUNTIMES)
    assert len({package.module for package in PACKAGES}) == len(PACKAGES)
    for runtime in RUNTIMES.values():
        extra = runtime.package.extra
        assert not extra or any(name in " ".join(EXTRAS[extra]) for name in runtime.package.distributions)


def test_each_device_has_a_baseline() -> None:
    assert TORCH_OF_DEVICE == {"cpu": "torch", "cuda": "torch-cuda"}
