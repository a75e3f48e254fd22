"""One attempt in a process of its own: whatever happens to the process becomes an outcome."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ended import has_ended
from sweep_cells import tiny_cells

from effexport.base.errors import UserError
from effexport.bench import executors as module
from effexport.bench.cells import LOG, Outcome
from effexport.bench.child import check_versions, outcome_of_request
from effexport.bench.executors import LOG_BYTES, LOG_LINES, Attempt, CellLimits, run_attempt

(CELL,) = tiny_cells(16)


def outcome_of(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, limits: CellLimits | None = None) -> Outcome:
    """Of a process that runs `code` in place of a build; `folder` is its argument."""
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", f"import os, sys, time\n{code}"))
    return run_attempt(Attempt({"cell": CELL.to_dict()}, limits or CellLimits()), folder)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV; see the log"),
        ("os.kill(os.getpid(), 9)", "its process was ended by SIGKILL; most likely the system ran out of memory"),
        ("sys.exit(3)", "its process ended with exit status 3 without an outcome; see the log"),
        (
            "open(sys.argv[1] + '/outcome.json', 'w').write('{')",
            "its process ended with exit status 0 without an outcome",
        ),
    ],
)
def test_a_process_that_ends_without_an_outcome_is_a_failure_with_its_log(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(f"print('building', flush=True)\n{code}", tmp_path, monkeypatch)
    assert outcome.status == "failed"
    assert outcome.reason.startswith(reason)
    assert outcome.log.startswith("building")
    assert (tmp_path / LOG).read_text().startswith("building")


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\ntime.sleep(600)"
    )
    outcome = outcome_of(code, tmp_path, monkeypatch, CellLimits(seconds=3.0))
    assert outcome.reason == "took longer than 3 s; raise --timeout"
    assert has_ended(int(outcome.log))


def test_only_the_end_of_a_long_log_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of("print('\\n'.join(map(str, range(100_000))))", tmp_path, monkeypatch)
    assert outcome.log.splitlines() == [str(number) for number in range(100_000 - LOG_LINES, 100_000)]
    outcome = outcome_of("print('x' * 10**6)", tmp_path, monkeypatch)
    assert len(outcome.log) <= LOG_BYTES


def test_an_artifact_beyond_the_limit_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = Outcome(status="finished", files={"model.onnx": 1001})
    code = f"open(sys.argv[1] + '/outcome.json', 'w').write({json.dumps(asdict(finished))!r})"
    outcome = outcome_of(code, tmp_path, monkeypatch, CellLimits(artifact_bytes=1000))
    assert outcome.status == "failed"
    assert outcome.reason == "the artifact has 1,001 bytes; expected at most 1,000: raise --max-artifact"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has died")
def test_the_process_of_an_attempt_ends_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    waits = "import os, sys, time\nfrom effexport.base.termination import die_with_parent\n"
    waits += "die_with_parent(int(sys.argv[1]))\n"
    waits += "print(os.getpid(), flush=True)\ntime.sleep(600)"
    starts = (
        f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {waits!r}, str(os.getpid())])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{starts}time.sleep(600)"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        assert has_ended(child)


def test_a_node_with_other_versions_refuses_the_cell() -> None:
    check_versions(CELL, {**CELL.versions, "onnx": None})
    other = replace(CELL, versions={**CELL.versions, "torch": "2.9.0"})
    with pytest.raises(UserError, match=r"has torch .*, the sweep was started with 2\.9\.0; install the same version"):
        check_versions(other, CELL.versions)


def test_what_a_request_asks_for_and_cannot_be_is_a_reason(tmp_path: Path) -> None:
    broken = {"cell": {**CELL.to_dict(), "spec": {**CELL.spec.to_dict(), "batch": 0}}}
    outcome = outcome_of_request(broken, tmp_path / "artifact")
    assert (outcome.status, outcome.reason) == ("failed", "batch is 0; expected at least 1")
