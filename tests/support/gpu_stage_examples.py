"""Stages that end in different ways, for the tests of gpu.stages. Their processes import this module."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from collections.abc import Sequence

from gpu.stages import PASSED, Result, Run, Stage, interruptible, run_stages


def passes(run: Run) -> Result:
    return Result(PASSED, f"{len(run.ops)} operators", {"ops": list(run.ops), "nan": float("nan")})


def raises(run: Run) -> Result:
    run.keep("example", {"found": 1})
    raise ValueError("the first line\nthe second line")


def crashes(run: Run) -> Result:
    run.keep("example", {"found": 2})
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def hangs(run: Run) -> Result:
    run.keep("example", {"found": 3})
    pid = run.results / "hanging.partial"
    pid.write_text(str(os.getpid()), encoding="utf-8")
    pid.replace(run.results / "hanging.pid")
    time.sleep(600)
    raise AssertionError("unreachable")


def leaves_a_child(run: Run) -> Result:
    child = subprocess.Popen(["sleep", "600"], process_group=0)
    (run.results / "child.pid").write_text(str(child.pid), encoding="utf-8")
    return passes(run)


def raises_for_lsh_sort(run: Run) -> Result:
    return raises(run) if "lsh_sort" in run.ops else passes(run)


def run_interruptibly(run: Run, stages: Sequence[Stage]) -> None:
    """Run the stages, then the last one again, as scripts/gpu does in its own process; keep what they gave."""
    with interruptible():
        results = [(stage.work, result) for stage, result, _ in run_stages(run, stages)]
    (run.results / "example.json").replace(run.work / "interrupted.json")
    ((_, afterwards, _),) = run_stages(run, stages[-1:])
    (run.work / "outcome").write_bytes(pickle.dumps((results, afterwards)))
