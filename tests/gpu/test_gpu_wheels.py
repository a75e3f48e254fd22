"""Wheels that are carried to a machine without a network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu import carrying
from gpu.device import SetupError


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
    carrying.install_wheels(*carried)
    command = [sys.executable, "-c", "import carried_part; print(carried_part.answer)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42\n"
    assert importlib.util.find_spec("carried_part") is not None


def test_a_missing_part_of_a_wheel_is_named(carried: tuple[Path, Path]) -> None:
    next(carried[0].glob("*.partac")).unlink()
    with pytest.raises(SetupError, match=r"carried_part-1\.0-py3-none-any\.whl is incomplete"):
        carrying.install_wheels(*carried)


def test_a_folder_without_wheels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="expected wheels"):
        carrying.install_wheels(tmp_path, tmp_path)


def test_a_wheel_for_another_python_is_an_error_in_the_words_of_pip(tmp_path: Path) -> None:
    make_wheel(tmp_path).rename(tmp_path / "carried_part-1.0-cp27-none-any.whl")
    with pytest.raises(SetupError, match="not a supported wheel"):
        carrying.install_wheels(tmp_path, tmp_path)
