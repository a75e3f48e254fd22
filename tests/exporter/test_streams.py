"""Standard streams that are closed, full or not for writing, and a folder that is gone: never status 0 without an
answer, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effexport.artifact import Artifact

Cli = Callable[..., Any]
PROGRAM = f"{sys.executable} -P -m effexport"
CLOSED = "effexport: error: stdout is closed; expected a file, a pipe or a terminal: to see nothing, >/dev/null\n"
FULL = "effexport: error: cannot write to stdout: No space left on device\n"


def in_bash(line: str, folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "errors"),
    [
        ("list >&-", 2, CLOSED),
        ("list --json >&-", 2, CLOSED),
        ("--version >&-", 2, CLOSED),
        ("list --help >&-", 2, CLOSED),
        ("completion bash >&-", 2, CLOSED),
        ("inspect nowhere >&-", 2, CLOSED),
        ("list >&- 2>&-", 2, ""),
        ("list <&- >&- 2>&-", 2, ""),
        ("list 1</dev/null", 2, "effexport: error: cannot write to stdout: Bad file descriptor\n"),
        ("--version >/dev/full", 1, FULL),
        ("list --json >/dev/full", 1, FULL),
        ("completion bash >/dev/full", 1, FULL),
        ("list >/dev/null 2>&-", 0, ""),
        ("list >/dev/null <&-", 0, ""),
        ("inspect nowhere 2>&-", 2, ""),
        ("inspect nowhere 2>/dev/full", 2, ""),
        ("inspect nowhere --json >/dev/full 2>/dev/full", 2, ""),
    ],
)
def test_a_stream_that_takes_nothing_is_said_or_at_least_not_status_0(
    tmp_path: Path, line: str, code: int, errors: str
) -> None:
    assert in_bash(f"{PROGRAM} {line}", tmp_path) == (code, "", errors)


def test_an_error_that_stdout_does_not_take_as_json_is_on_stderr(tmp_path: Path) -> None:
    code, _, errors = in_bash(f"{PROGRAM} inspect nowhere --json >/dev/full", tmp_path)
    assert code == 2
    assert errors.startswith("effexport: error: nothing is at nowhere; ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path, closed: str) -> None:
    """Libraries in C++ write to the numbers 1 and 2, whatever they are."""
    script = tmp_path / "numbers.py"
    script.write_text(
        "import os, sys\n"
        "from effexport.__main__ import open_standard_streams\n"
        "open_standard_streams()\n"
        "print(os.open(sys.argv[0], os.O_RDONLY), all(os.fstat(n) for n in range(3)))\n"
    )
    code, out, _ = in_bash(f"{sys.executable} -P {script} {closed}", tmp_path)
    assert (code, out.split()[1]) == (0, "True")
    assert int(out.split()[0]) > 2


@pytest.mark.requires("torch", "onnx", "ort")
def test_text_from_a_closed_stdin_is_refused(
    cli: Cli, built: Callable[..., Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from effexport.base.errors import UserError
    from effexport.cli.run import text_of_stdin
    from effexport.tasks.texts import STDIN, text_of_file

    monkeypatch.setattr("sys.stdin", None)
    for read in (text_of_stdin, lambda: text_of_file(STDIN)):
        with pytest.raises(UserError, match="standard input is closed; expected a text on it"):
            read()


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, which somebody has removed."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize(
    "command",
    [
        "build --variant softmax -o x",
        "build --variant softmax",
        "build --checkpoint c -o /x",
        "build --module m:make",
        "verify x",
        "verify /x -o report.html",
        "inspect .",
        "report x -o y.md",
        "run x --input i.npz -o o.npz",
        "refit x --weights w.safetensors",
        "inline x -o y.onnx",
        "package x -o y",
        "serve x",
        "evaluate x --data d.npz",
        "bench --variants softmax -o y",
        "sweep s.toml -o y",
        "plugins build --with f",
        "list",
    ],
)
def test_a_current_folder_that_is_gone_is_one_line(cli: Cli, command: str) -> None:
    assert cli(*command.split()).error() == "the current folder does not exist any more; change to another one with cd"


@pytest.mark.parametrize("flags", ["", "-P"])
def test_the_program_starts_where_the_folder_is_gone(tmp_path: Path, flags: str) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} {flags} -m effexport build --variant lsh -o x"
    code, out, errors = in_bash(line, tmp_path)
    assert (code, out) == (2, "")
    assert errors == "effexport: error: the current folder does not exist any more; change to another one with cd\n"
    assert os.listdir(tmp_path) == []
