"""Commands on a machine that only runs artifacts: PyTorch and the ONNX exporter are not installed there.

Here both are hidden from a child process; tests/test_packaging.py does the same in a clean environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runtime_commands

from effexport.artifact import Artifact

Built = Callable[..., Artifact]
# Runs the command lines of argv[1], a JSON list of lists, and prints [exit status, output] of each as JSON.
CHILD = """
import contextlib, importlib.metadata, io, json, sys, traceback

for name in ("torch", "onnxscript"):
    sys.modules[name] = None
found = importlib.metadata.version

def version(name):
    if name in ("torch", "onnxscript"):
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

importlib.metadata.version = version
from effexport.__main__ import main

results = []
for words in json.loads(sys.argv[1]):
    output, code = io.StringIO(), None
    sys.argv = ["effexport", *words]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
    results.append([code, output.getvalue()])
print(json.dumps(results))
"""


def run_without_torch(folder: Path, commands: list[list[str]]) -> list[tuple[int | None, str]]:
    """Exit status (None after a traceback) and output of each command, all run in one child process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(commands)], cwd=folder, capture_output=True, text=True, check=True
    )
    results: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [(code, output) for code, output in results]


@pytest.mark.requires("torch", "ort")
def test_commands_that_need_no_pytorch_work_without_it(built: Built, tmp_path: Path) -> None:
    runtime_commands.prepare(tmp_path)
    artifact = built("lsh", "encoder").path
    commands = [runtime_commands.words(command, artifact) for command, _ in runtime_commands.WORKING]
    results = run_without_torch(tmp_path, commands)
    for (command, expected), (code, output) in zip(runtime_commands.WORKING, results, strict=True):
        assert code == 0, f"{command}\n{output}"
        assert expected in output, f"{command}\n{output}"


@pytest.mark.requires("torch", "ort")
def test_commands_that_need_pytorch_name_the_extra_that_adds_it(built: Built, tmp_path: Path) -> None:
    runtime_commands.prepare(tmp_path)
    artifact = built("lsh", "encoder").path
    commands = [runtime_commands.words(command, artifact) for command in runtime_commands.REFUSED]
    results = run_without_torch(tmp_path, commands)
    for command, (code, output) in zip(runtime_commands.REFUSED, results, strict=True):
        (line,) = [line for line in output.splitlines() if line.startswith("effexport: error: ")]
        assert (code, runtime_commands.REMEDY in line) == (2, True), f"{command}\n{output}"
        assert "Traceback" not in output
    assert not (tmp_path / "new").exists()
