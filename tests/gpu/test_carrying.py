"""What is carried to a machine without a network: parts of a size that fits, and whole again there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpu import carrying, wheels
from gpu.device import SetupError


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "PART_BYTES", 1000)


def make_files(folder: Path, sizes: dict[str, int]) -> list[Path]:
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(index % 251 for index in range(size)))
    return list(folder.iterdir())


@pytest.mark.usefixtures("small_parts")
def test_files_are_packed_into_parts_of_a_size_and_joined_again(tmp_path: Path) -> None:
    make_files(tmp_path / "carried" / "1", {"library.so": 600})
    files = make_files(tmp_path / "wheels", {"large.whl": 3500, "small.whl": 300, "medium.whl": 900})
    carrying.pack(files, tmp_path / "carried")
    parts = {part.name: carrying.size_of(part) for part in (tmp_path / "carried").iterdir()}
    assert sum(parts.values()) == 600 + 3500 + 300 + 900
    assert max(parts.values()) <= 1000
    assert (tmp_path / "carried" / "1" / "small.whl").is_file()
    (tmp_path / "work").mkdir()
    (joined,) = wheels.join_parts(tmp_path / "carried", tmp_path / "work")
    assert joined.name == "large.whl"
    assert joined.read_bytes() == (tmp_path / "wheels" / "large.whl").read_bytes()


@pytest.mark.usefixtures("small_parts")
def test_artifacts_that_fill_the_first_part_are_one_error(tmp_path: Path) -> None:
    make_files(tmp_path / "1", {"model.onnx": 1001})
    with pytest.raises(SetupError, match="expected at most"):
        carrying.pack([], tmp_path)


def test_a_failed_download_is_one_error_in_the_words_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        return subprocess.CompletedProcess(command, 1, "", "No matching distribution")

    monkeypatch.setattr(carrying.subprocess, "run", run)
    with pytest.raises(SetupError, match="pip cannot download the wheels: No matching distribution"):
        carrying.download_wheels(tmp_path, "3.12")
    assert "--no-deps" in asked
    assert asked[-1].startswith("onnxruntime-gpu==1.")
