"""An installation that was interrupted, so that a package is missing or broken: one line says how to repair it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from effexport.base.environment import why_not_importable
from effexport.runners.ort import import_onnxruntime


def run(folder: Path, hidden: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`effexport ARGUMENTS` in a process that cannot import the module `hidden`."""
    code = (
        "import sys; sys.modules[sys.argv.pop(1)] = None; from effexport.__main__ import main; main()"
        if not (folder / hidden).exists()
        else "import sys; sys.argv.pop(1); sys.path.insert(0, ''); from effexport.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code, hidden, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("hidden", "arguments"),
    [
        ("click", ["--help"]),
        ("click", ["list", "--json"]),
        ("rich", ["list"]),
        ("rich", ["doctor"]),
        ("msgspec", ["inspect", "."]),
        ("numpy", ["verify", "."]),
    ],
)
def test_a_missing_package_is_one_line_that_says_how_to_install_it(
    tmp_path: Path, hidden: str, arguments: list[str]
) -> None:
    done = run(tmp_path, hidden, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"effexport: error: {hidden} cannot be imported (")
    assert line.endswith(f"repeat it with: pip install --force-reinstall {hidden}")
    assert ('"exit_code": 2' in done.stdout) == ("--json" in arguments)


def test_a_package_that_refuses_to_load_is_one_line_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise ImportError('a file is cut short')\n")
    done = run(tmp_path, "rich", "list")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "rich cannot be imported (a file is cut short)" in line


@pytest.mark.requires("torch")
def test_a_package_without_one_of_its_shared_libraries_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import ctypes\nctypes.CDLL('libabsent.so.1')\n")
    done = run(tmp_path, "torch", "build", "--variant", "softmax", "-o", "out")
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "torch, needed to build and bench models: does not load: libabsent.so.1: cannot open shared object" in line
    assert line.endswith("pip install --force-reinstall torch")
    assert "Traceback" not in done.stderr


@pytest.mark.requires("ort")
def test_a_damaged_onnxruntime_is_not_taken_for_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("raise ImportError('libabsent.so.1: cannot open')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        import_onnxruntime()
    advice = why_not_importable(caught.value)
    assert advice is not None
    assert advice.startswith("onnxruntime cannot be imported (libabsent.so.1: cannot open), perhaps")
    assert advice.endswith("pip install --force-reinstall onnxruntime")


def test_a_missing_module_of_our_own_keeps_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "effexport.cli.descriptions", "list")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
