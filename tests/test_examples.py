"""The examples run as they stand, each in a process and a folder of its own; the one in C++ is compiled."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import effexport
from effexport.plugins import get_library_path
from effexport.plugins.building.build import find_headers

ROOT = Path(__file__).parents[1]
# Layers of several packages; the soak run has the others. Every package's layers have tests in models/adapters as well.
IN_EVERY_RUN = ("mixed_model.py",)
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_every_package_that_is_known_has_an_example() -> None:
    from effexport.models.adapters.replace import adapters

    texts = "".join((ROOT / "examples" / name).read_text(encoding="utf-8") for name in EXAMPLES)
    packages = {adapter.package: adapter.package.replace("-", "_").removeprefix("pytorch_") for adapter in adapters()}
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


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort", "native")
def test_the_program_in_cpp_answers_as_python_does_with_and_without_kernels(tmp_path: Path) -> None:
    import onnxruntime

    compiler = shutil.which("c++")
    assert compiler is not None
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # as ONNX Runtime's package for C++ names it
    program = tmp_path / "run"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{find_headers().folder}", f"-Wl,-rpath,{tmp_path}"]
    command = [compiler, *flags, ROOT / "examples/cpp/run.cc", tmp_path / "libonnxruntime.so.1", "-o", program]
    subprocess.run(command, check=True)
    effexport.build(variant="lsh", dim=32, heads=2, layers=1, seq_len=64, output=tmp_path / "lsh")
    text = b"Paris is the capital of France."
    with effexport.load(tmp_path / "lsh") as runner:
        ids = np.frombuffer(text, np.uint8)[None].astype(np.int64) + 2
        expected = runner.run({"input_ids": ids})["last_hidden_state"][0, -1, :4]
    for kernels in ([], [get_library_path()]):
        run = [program, tmp_path / "lsh/model.onnx", *kernels]
        printed = subprocess.run(run, input=text, capture_output=True, check=True).stdout.decode()
        shape, numbers = re.fullmatch(r"last_hidden_state \[(.*)\]:(.*)\n", printed).groups()  # type: ignore[union-attr]
        assert shape == "1, 31, 32"
        # six decimals are printed; kernels and definitions differ by rounding, less than 1e-5 of an RMS near 1
        np.testing.assert_allclose([float(x) for x in numbers.split()], expected, atol=1e-5)
