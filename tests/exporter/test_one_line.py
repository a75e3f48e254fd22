"""A line feed in a name forges no second line, for any command; nor does a name drive the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from effexport.artifact import Artifact
from effexport.base.formatting import one_line

Cli = Callable[..., Any]
Built = Callable[..., Artifact]
# A line feed, an escape sequence, a return and a mark that turns the direction of a text.
NAME = "a\nFORGED\x1b[31m\rFORGED\u202eb"
SHOWN = r"a\nFORGED\x1b[31m\rFORGED\u202eb"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 😀", "plain é 😀"),
        (NAME, SHOWN),
        ("\x00\x07\x08\t\x0b\x7f\x9b", r"\x00\x07\x08\t\x0b\x7f\x9b"),
        ("\u2028\u2029\u0085\u200e\u2066\ufeff", r"\u2028\u2029\x85\u200e\u2066\ufeff"),
        ("\ud800\udcff", r"\ud800\udcff"),
        ("back\\slash 'quotes'", "back\\slash 'quotes'"),
    ],
)
def test_what_controls_a_terminal_is_shown_instead(text: str, expected: str) -> None:
    assert one_line(text) == expected


# A is an artifact, F a file that is none of those that are expected, D a folder, X missing; I has other inputs.
COMMANDS = [
    "verify A",
    "verify A --reference golden -o Xv.md",
    "verify X",
    "verify F",
    "verify P",
    "verify A --model F",
    "verify A --model X",
    "verify A --weights F",
    "verify A --data F",
    "verify A --case X",
    "verify A --runtime X",
    "verify A --reference X@ort",
    "verify A --reference a@X",
    "verify A --implementation X",
    "inspect A",
    "inspect D",
    "inspect F",
    "inspect X",
    "report A",
    "report A A --format markdown",
    "report A -o Xr.html",
    "report A --format X",
    "run A --input I -o Xo.npz",
    "run A --input F",
    "run A --input X",
    "build --variant X",
    "build --variant softmax -o F",
    "build --variant softmax -o A",
    "build --checkpoint D",
    "build --checkpoint X",
    "build --module X:make",
    "build --module os:X",
    "build --spec F",
    "build --spec X",
    "build --variant softmax --weights F",
    "build --variant softmax --precision X",
    "refit A --weights F",
    "refit A --checkpoint D",
    "inline A -o Xi.onnx",
    "inline A -o D",
    "package A -o Xt --name m",
    "package A -o Xt --name X",
    "serve X",
    "serve A --model-name X",
    "evaluate A --data F",
    "bench --variants X",
    "bench --variants softmax --runtimes X",
    "bench --variants softmax --spec F",
    "sweep F",
    "sweep X",
    "plugins build --with D",
    "plugins X",
    "completion X",
    "list X",
    "list --X",
    "X",
    "--X",
]


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_feed_in_a_name_makes_no_line(
    cli: Cli, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    artifact = built("softmax", "attention").path
    shutil.copytree(artifact, f"A{NAME}")
    shutil.copytree(artifact, f"P{NAME}/{NAME}")
    Path(f"D{NAME}").mkdir()
    Path(f"F{NAME}").write_text("x")
    np.savez(f"I{NAME}.npz", **{NAME: np.zeros(2, np.float32)})
    words = [f"{word}{NAME}.npz" if word == "I" else named(word) for word in command.split()]
    shown = cli(*words)
    text = shown.out + shown.err
    assert "Traceback" not in text
    assert text.translate({ord("\n"): None}).isprintable()
    assert not any(line.strip().startswith("FORGED") for line in text.splitlines())
    if shown.code == 2:
        lines = shown.err.strip().splitlines()
        # after a failed build of kernels, a second line says that the library of before is kept
        assert len(lines) == 1 or "…" in shown.err or (len(lines) == 2 and "stays in use" in lines[1])


def named(word: str) -> str:
    """The word with the name after its capital letter."""
    return "".join(f"{sign}{NAME}" if sign in "ADFPX" else sign for sign in word)
