"""Benchmarks beside a program that keeps one core busy: they conclude what they conclude without it, or nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from effexport.base.machine import Machine
from effexport.bench.findings import crossovers, curves, disturbance, headlines
from effexport.bench.grid import BenchResults, results_from_json

# measures three times, and wants a machine for itself
pytestmark = [pytest.mark.soak, pytest.mark.requires("torch", "onnx", "ort")]
# At these lengths, one model is clearly faster in both runtimes, so that no conclusion hangs on chance.
GRID = ["--variants", "softmax,linear", "--seq-lens", "512,2048", "--runtimes", "torch,ort"]
QUICK = ["--rounds", "5", "--max-seconds", "5", "--no-memory"]
CHILD = "import os, runpy, sys; os.sched_setaffinity(0, {{{cores}}}); sys.argv[0] = 'effexport'; {then}"
RUN = "runpy.run_module('effexport', run_name='__main__')"
SPIN = "[None for _ in iter(int, 1)]"


def python_on(cores: set[int], then: str) -> list[str]:
    """The start of a command that runs Python code on these cores only."""
    return [sys.executable, "-P", "-c", CHILD.format(cores=", ".join(map(str, sorted(cores))), then=then)]


@contextmanager
def busy(core: int) -> Iterator[None]:
    """A program that never stops computing on this core."""
    process = subprocess.Popen(python_on({core}, SPIN))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measured(cores: set[int], output: Path) -> BenchResults:
    done = subprocess.run(
        [*python_on(cores, RUN), "bench", *GRID, *QUICK, "-o", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = results_from_json(output / "results.json")
    assert disturbance(results) in done.stdout
    return results


def conclusions(results: BenchResults) -> dict[str, str]:
    """Conclusions about each runtime, without figures: the fastest model, and on which side the other one is."""
    found = {}
    for sentence in headlines(results):
        where, _, rest = sentence.partition(", ")
        if " is the fastest" in rest:
            found[where] = rest.partition(" is the fastest")[0]
    for curve, text in crossovers(curves(results)):
        if not text.startswith("not compared"):
            found[f"{curve.label}, {curve.place}"] = re.sub("[0-9, ]+", "", text)
    return found


def test_beside_a_busy_core_a_benchmark_concludes_the_same_or_nothing(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(usable) < 2 or Machine().waits() is None:
        pytest.skip("this needs two cores, and a system that tells how long threads wait for a core")
    cores = set(usable[:2])
    alone = measured(cores, tmp_path / "alone")
    with busy(usable[0]):
        beside = [measured(cores, tmp_path / name) for name in ("first", "second")]
    for results in beside:
        # a call of some milliseconds that needs both cores cannot have them
        assert disturbance(results)
        for one in results.rows:
            if not one.is_quotable:
                assert (one.times_softmax, one.times_torch, one.times_floor) == (None, None, None)
    for results, others in ((alone, beside), (beside[0], beside[1:])):
        expected = conclusions(results)
        for other in others:
            found = conclusions(other)
            assert {key: found[key] for key in found.keys() & expected} == {
                key: expected[key] for key in found.keys() & expected
            }
