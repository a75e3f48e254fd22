"""A sample of the interruptions, for the soak; scripts/soak.sh runs hundreds as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from campaign.interruptions import Finished

SCRIPT = Path(__file__).parents[2] / "scripts" / "campaign.py"
# One of every kind: kills, small disks, a signal, and commands at once.
CASES = 10


@pytest.mark.soak
@pytest.mark.requires("torch", "onnx", "ort", "small-disk")
def test_an_interrupted_command_leaves_the_old_output_or_the_new_one() -> None:
    # a process of its own, because it forks
    command = [sys.executable, str(SCRIPT), "--part", "interruptions", "--cases", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1]
    assert row.startswith(f"| Full disks, kills and simultaneous commands | {CASES} |")
    assert "| 0 |" in row


@pytest.mark.parametrize(
    ("code", "err", "problem"),
    [
        (0, "", "exit status 0 instead of"),
        (1, "", "not one line"),
        (1, "effexport: error: a\neffexport: error: b\n", "not one line"),
        (1, "effexport: error: a\nand more\n", "lines after the error"),
        (1, "Traceback (most recent call last):\n", "Traceback"),
    ],
)
def test_a_command_that_ends_in_another_way_is_a_problem(code: int, err: str, problem: str) -> None:
    Finished(["build"], 1, "", "effexport: error: the disk is full\n", 1.0).check(1)
    with pytest.raises(AssertionError, match=problem):
        Finished(["build"], code, "", err, 1.0).check(1)
