"""gpu.programs: a program ends in time, with its children, and what it had printed is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ended import has_ended
from gpu import programs
from gpu.programs import run_program


def test_output_exit_status_and_environment_are_those_of_the_program() -> None:
    code = "import os, sys; print(os.environ['NAME']); print('bad', file=sys.stderr); sys.exit(3)"
    done = run_program([sys.executable, "-c", code], 60, {**os.environ, "NAME": "value"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "value\n", "bad\n")


def test_a_program_that_is_interrupted_in_time_may_write_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 60.0)  # for a busy machine; the program ends at once
    script = "trap 'echo kept; exit' INT; echo begun; while :; do sleep 0.1; done"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_program(["sh", "-c", script], 2)
    assert caught.value.stdout == "begun\nkept\n"


@pytest.mark.parametrize("seconds", [3.0, 0.0])
def test_a_program_that_ignores_signals_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 0.5)
    script = f"trap '' INT; sleep 600 & echo $! > {tmp_path}/child; echo begun; wait; sleep 600"
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["sh", "-c", script], seconds)
    assert time.monotonic() - begin < 60
    if seconds:
        assert has_ended(int((tmp_path / "child").read_text()))
