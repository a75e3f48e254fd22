"""Files carried to a machine without a network: parts of a size that fits, and whole again there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpu import carrying
from gpu.device import SetupError


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "part_bytes", lambda: 1000)


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
    (joined,) = carrying.join_parts(tmp_path / "carried", tmp_path / "work")
    assert joined.name == "large.whl"
    assert joined.read_bytes() == (tmp_path / "wheels" / "large.whl").read_bytes()


@pytest.mark.usefixtures("small_parts")
def test_artifacts_that_fill_the_first_part_are_one_error(tmp_path: Path) -> None:
    make_files(tmp_path / "1", {"model.onnx": 1001})
    with pytest.raises(SetupError, match="expected at most"):
        carrying.pack([], tmp_path)


def test_the_tree_and_the_largest_part_fit_into_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(carrying, "tree_bytes", lambda: 50_000_000)
    monkeypatch.setattr(carrying, "CARRIED", tmp_path)
    monkeypatch.setattr(carrying, "ROOT", tmp_path.parent)
    (library,) = make_files(tmp_path / "built", {"library.so": 30_000_000})
    carrying.pack([library], tmp_path)
    (library.rename(tmp_path.parent / "library.so"), library.parent.rmdir())
    sizes = [carrying.size_of(part) for part in tmp_path.iterdir()]
    assert sum(sizes) == 30_000_000
    assert 50_000_000 + max(sizes) <= carrying.COPY_BYTES == 64 * 1024 * 1024
    carrying.print_parts()
    assert "15.0 MB + tree 50.0 = 65.0 of 67.1 MB  library.so.partaa, …" in capsys.readouterr().out
    monkeypatch.setattr(carrying, "tree_bytes", lambda: 60_000_000)
    carrying.print_parts()
    assert "= 75.0 of 67.1 MB, which is too much: run --carry again" in capsys.readouterr().out


def test_a_tree_that_leaves_no_room_is_one_error_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "tree_bytes", lambda: 60_000_000)
    with pytest.raises(SetupError, match=r"the tree has 60\.0 MB .*; expected at most 56\.6.* Remove large files"):
        carrying.carry("3.12")


def test_the_tree_is_what_git_does_not_ignore_and_the_folder_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert carrying.tree_bytes() is None
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("shared/\nbuild/\n")
    make_files(tmp_path / "shared" / "deep", {"seen": 100})
    make_files(tmp_path / "build", {"ignored": 1000})
    make_files(tmp_path / "source", {"untracked": 20})
    (tmp_path / "link").symlink_to("build/ignored")
    assert carrying.tree_bytes() == len("shared/\nbuild/\n") + 100 + 20 + len("build/ignored")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert carrying.tree_bytes() is None
    with pytest.raises(SetupError, match="git cannot list the files"):
        carrying.part_bytes()


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
