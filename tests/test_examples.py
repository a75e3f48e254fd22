"""The examples run as they stand, each in a process and a folder of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Layers of several packages; the soak run has the others. Every package's layers have tests in models/adapters as well.
IN_EVERY_RUN = ("mixed_model.py",)
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_every_package_that_is_known_has_an_example() -> None:
    from effexport.models.adapters.replace import ADAPTERS

    texts = "".join((ROOT / "examples" / name).read_text(encoding="utf-8") for name in EXAMPLES)
    packages = {adapter.package: adapter.package.replace("-", "_").removeprefix("pytorch_") for adapter in ADAPTERS}
    assert not [package for package, module in packages.items() if module not in texts]


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort", "foreign", "transformers")
@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.soak) for name in EXAMPLES]
)
def test_an_example_is_proven(name: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    if "is not installed" in result.stdout:
        # the one package that is built from source, in minutes
        assert name == "fast_transformers_model.py"
        assert importlib.util.find_spec("fast_transformers") is None
    else:
        assert "passed" in result.stdout
