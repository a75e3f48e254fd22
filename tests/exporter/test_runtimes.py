"""The table of runtimes: every row has the module that opens it and the extra that installs it."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from pathlib import Path

import pytest

from effexport.base.environment import PACKAGES
from effexport.base.runtimes import ARTIFACT_RUNTIMES, ENGINE_RUNTIMES, RUNTIMES, TORCH_OF_DEVICE, Runtime
from effexport.runners.options import RunOptions
from effexport.tensorrt.spec import EngineSpec

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


def test_rows_name_fields_of_the_options_and_each_field_says_what_it_is() -> None:
    fields = {field.name: field for field in dataclasses.fields(RunOptions)}
    assert {name for row in RUNTIMES.values() for name in row.takes} < fields.keys()
    for field in fields.values():
        assert field.metadata["help"].endswith(".")
        assert field.metadata["section"] in ("model", "CPU", "GPU", "TensorRT")
    known = {field.name for field in dataclasses.fields(EngineSpec)}
    assert {name for row in ENGINE_RUNTIMES.values() for name in row.engine_options} < known
