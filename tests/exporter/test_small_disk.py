"""Commands on a real file system that is too small: libraries raise what they like, and we say it in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from effexport.artifact import Artifact

Built = Callable[..., Artifact]
pytestmark = pytest.mark.requires("small-disk", "torch", "ort")
# argv: the file system's size, its folder, a file for what is left, then the command
SCRIPT = """
size=$1; disk=$2; left=$3; shift 3
mount -t tmpfs -o "size=$size" tmpfs "$disk" || exit 99
"$@"
code=$?
find "$disk" -mindepth 1 >"$left"
exit $code
"""
BUILD = "build --variant aft-simple --scope attention --seq-len 32 --dim 64 --heads 2"
BENCH = "bench --variants aft-simple --seq-lens 32 --heads 2 --head-dim 16 --rounds 1 --no-memory"
FOLDER, FILE = "choose another folder with -o", "choose another file with -o"
# A command, the size of the disk, and the remedy. The model of the build has 70 kB; its reference, pages and manifest
# come after it, so that each size fails at another of them.
COMMANDS = [
    (f"{BUILD} -o DISK/new/a", "40k", FOLDER),
    pytest.param(f"{BUILD} --external-data -o DISK/a", "40k", FOLDER, marks=pytest.mark.soak),
    pytest.param(f"{BUILD} -o DISK/a", "120k", FOLDER, marks=pytest.mark.soak),
    (f"{BUILD} -o DISK/a", "300k", FOLDER),
    (f"{BENCH} --runtimes ort -o DISK/b", "4k", FOLDER),
    ("run ARTIFACT --text TEXT --output DISK/o.npz", "4k", "choose another file with -o"),
    ("report ARTIFACT -o DISK/r.html", "4k", FILE),
    ("verify ARTIFACT -o DISK/v.html", "4k", FILE),
    ("inline ARTIFACT -o DISK/i.onnx", "8k", FILE),
    ("package ARTIFACT --format triton -o DISK/repository", "40k", FOLDER),
]


def run(
    folder: Path, size: str, words: list[str], **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The command with a file system of this size at folder/disk, and what it left there."""
    (folder / "disk").mkdir()
    # -c: a process of its own, in whose namespace alone the file system exists
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", SCRIPT, "bash"]
    command = [
        *unshare,
        size,
        str(folder / "disk"),
        str(folder / "left"),
        sys.executable,
        "-P",
        "-m",
        "effexport",
        *words,
    ]
    environment = os.environ | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, (folder / "left").read_text(encoding="utf-8").splitlines()


def errors(done: subprocess.CompletedProcess[str]) -> Iterator[str]:
    """The lines of stderr that tell more than progress."""
    return (line for line in done.stderr.splitlines() if not line.startswith(("…", "plan: ")))


@pytest.mark.parametrize(("command", "size", "remedy"), COMMANDS)
def test_a_full_disk_is_one_line_and_nothing_is_left_behind(
    built: Built, tmp_path: Path, command: str, size: str, remedy: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100, encoding="utf-8")
    names = {"ARTIFACT": str(built("lsh", "encoder").path), "TEXT": str(text), "DISK": str(tmp_path / "disk")}
    words = command.split()
    for name, value in names.items():
        words = [word.replace(name, value) for word in words]
    done, left = run(tmp_path, size, words)
    (line,) = errors(done)
    assert done.returncode == 1, line
    assert line.startswith(f"effexport: error: cannot write {tmp_path / 'disk'}")
    assert f" free in {tmp_path / 'disk'}" in line
    assert line.endswith((f"; free some space, or {remedy}", "nothing was changed"))
    assert left == []


def test_a_benchmark_names_the_temporary_folder_that_is_full(tmp_path: Path) -> None:
    words = [*BENCH.split(), "--runtimes", "naive", "-o", "bench"]
    done, left = run(tmp_path, "4k", words, TMPDIR=str(tmp_path / "disk"))
    (line,) = errors(done)
    assert done.returncode == 1
    assert line.endswith("; free some space, or set TMPDIR to a folder with more room")
    assert [path for path in left if "effexport" in path] == []
    assert not (tmp_path / "bench").exists()


def test_a_sweep_stops_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        'variants = ["aft-simple"]\nseq_lens = [32]\n[build]\nscope = "attention"\ndim = 64\nheads = 2\n'
    )
    words = ["sweep", "sweep.toml", "--processes", "-o"]
    done, _ = run(tmp_path, "8k", [*words, str(tmp_path / "disk" / "sweep")])
    (line,) = (line for line in errors(done) if line.startswith("effexport: error: "))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert ": the disk is full (" in line
