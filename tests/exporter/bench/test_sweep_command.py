"""`effexport sweep` as users run it: real builds of tiny models, and what stops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effexport.artifact import open_artifact
from effexport.bench import executors as attempt_module
from effexport.bench.cells import ATTEMPTS, CELLS, STAGING

TINY = '[build]\nscope = "attention"\ndim = 16\nheads = 2\n'
ONE = f'variants = ["softmax"]\nseq_lens = [16]\n{TINY}'


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(ONE)
    return path


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    """`effexport sweep …` in a process of its own, which has said that its first cell runs."""
    command = [sys.executable, "-m", "effexport", "sweep", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts what it puts into the background with SIGINT ignored, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    while "[0/1]" not in (line := process.stderr.readline()):
        assert line, "it has ended"
    return process


def children_of(folder: Path) -> list[int]:
    """Processes that build something in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"effexport.bench.child" in command and str(folder).encode() in command:
                found.append(int(entry.name))
    return found


def until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_sweep_that_is_killed_or_interrupted_goes_on_where_it_stopped(
    sweep_file: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    out = tmp_path / "out"
    arguments = (sweep_file, "-o", out, "--processes")

    killed = started(*arguments)
    assert until(lambda: len(children_of(out)) == 1)
    killed.kill()
    killed.communicate()
    assert until(lambda: not children_of(out)), "the build goes with the sweep"
    assert [*(out / CELLS).iterdir()] == []

    interrupted = started(*arguments, "--json")
    assert until(lambda: len(children_of(out)) == 1)
    interrupted.send_signal(signal.SIGINT)
    text, err = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130
    assert "run the same command again to resume" in err
    assert json.loads(text)["complete"] is False
    assert until(lambda: not children_of(out))
    assert [*(out / CELLS).iterdir()] == []
    assert [*(out / STAGING).iterdir()] == []
    assert not (out / ATTEMPTS).exists()

    done = cli("sweep", *arguments, "--json")
    assert done.code == 0, done.err
    (cell,) = done.json["cells"]
    assert (cell["status"], cell["parity"], cell["is_new"]) == ("finished", "passed", True)
    assert 0 < cell["worst_error"] < cell["error_limit"]
    artifact = open_artifact(out / cell["artifact"])
    assert artifact.spec.model.seq_len == 16
    assert (
        sum(path.stat().st_size for path in artifact.path.rglob("*") if path.is_file()) - cell["artifact_bytes"]
        == (artifact.path / "manifest.json").stat().st_size
    )
    assert cell["model_bytes"] == artifact.model_path.stat().st_size  # golden values are not a part of the model
    assert "checking parity" in (out / cell["log"]).read_text()

    sweep_file.write_text(ONE.replace("[16]", "[16, 17]"))
    planned = cli("sweep", sweep_file, "-o", out, "--dry-run", "--json").json
    assert [entry["state"] for entry in planned["cells"]] == ["finished", "to run"]
    again = cli("sweep", sweep_file, "-o", out, "--processes", "--only", cell["id"])
    assert again.code == 0, again.err
    assert "2 cells: 1 finished and 1 not run (all before)" in again.out


def test_a_dry_run_lists_cells_and_writes_nothing(sweep_file: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    result = cli("sweep", sweep_file, "-o", tmp_path / "out", "--dry-run", "--json")
    assert result.code == 0
    (cell,) = result.json["cells"]
    assert cell["would_run"]
    assert cell["id"].startswith("softmax-16-fp32-onnx-")
    assert cell["digest"].startswith(cell["id"].rpartition("-")[2])
    assert cell["id"] in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--jobs", "0"], "--jobs is 0; expected a number above 0"),
        (["--wait", "-1"], "--wait is -1; expected seconds, 0 or more"),
        (["--timeout", "0"], "--timeout is 0.0; expected a number above 0"),
        (["--max-artifact", "much"], "--max-artifact is 'much'; expected bytes"),
        (["--address", ""], "--address is empty"),
        (["--address", "auto", "--processes"], "--processes runs on this machine, --address on a cluster; give one"),
        (["--address", "auto", "--jobs", "2"], "--jobs does not work with --address"),
        (["--only", "softmax-99"], "--only softmax-99 is not a cell of the file"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_written(
    options: list[str], said: str, sweep_file: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    assert said in cli("sweep", sweep_file, "-o", tmp_path / "out", *options).error()
    assert not (tmp_path / "out").exists()


def test_a_bad_file_is_one_message_with_its_name_and_nothing_is_written(
    sweep_file: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    sweep_file.write_text(ONE.replace("heads = 2", "heads = 3"))
    message = cli("sweep", sweep_file, "-o", tmp_path / "out").error()
    assert message.startswith(
        f"{sweep_file}: the cell softmax, 16 tokens, onnx cannot be built: dim 16 cannot be split"
    )
    assert not (tmp_path / "out").exists()


def test_a_crash_is_a_row_with_a_reason_a_log_and_a_command_and_is_repeated_on_request(
    sweep_file: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os\nprint('before the end', flush=True)\nos.kill(os.getpid(), 11)"
    monkeypatch.setattr(attempt_module, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out"
    result = cli("sweep", sweep_file, "-o", out, "--json")
    assert result.code == 1
    (cell,) = result.json["cells"]
    assert "Ray is not installed, so cells run as plain processes on this machine, with the same results" in result.err
    assert "its process was ended by SIGSEGV" in result.err
    assert "| before the end" in result.err
    assert f"to run this cell only: effexport sweep {sweep_file} -o {out} --only {cell['id']}" in result.err
    lines = len((out / ATTEMPTS).read_text().splitlines())
    left = cli("sweep", sweep_file, "-o", out)
    assert left.code == 1, "what failed before still is not there"
    assert "1 failed before (skipped; --retry-failed runs them again)" in left.err
    assert len((out / ATTEMPTS).read_text().splitlines()) == lines
    for options in (["--retry-failed"], ["--only", cell["id"].rpartition("-")[2]]):
        assert cli("sweep", sweep_file, "-o", out, *options).code == 1
        lines += 1
        assert len((out / ATTEMPTS).read_text().splitlines()) == lines


def test_without_ray_an_address_is_refused_with_the_extra_to_install(
    sweep_file: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    message = cli("sweep", sweep_file, "-o", tmp_path / "out", "--address", "auto").error()
    assert "pip install 'effexport[sweep]'" in message


def test_the_command_of_a_sweep_loads_no_framework_until_it_runs() -> None:
    code = "import sys, effexport.cli.sweep\nassert not {'ray', 'torch', 'onnx', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
