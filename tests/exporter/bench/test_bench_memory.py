"""Peak memory is what was used, and what will not fit is not begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from effexport.bench import costs as memory
from effexport.bench.executors import peak_memory
from effexport.bench.grid import BenchCase, Grid, models_from_text

PLANTED = """
import sys
from effexport.base.machine import peak_bytes_of
MB = 10**6
held = bytearray(300 * MB)  # before: not counted
for i in range(0, len(held), 4096):
    held[i] = 1
del held  # its peak must not be counted either
def work():
    block = bytearray(200 * MB)
    for i in range(0, len(block), 4096):
        block[i] = 1
print(peak_bytes_of(work))
"""


def case_of(variant: str, seq_len: int = 128, runtime: str = "torch") -> BenchCase:
    models = models_from_text(variant)
    return next(Grid(models=models, seq_lens=(seq_len,), runtimes=(runtime,), heads=2, head_dim=16).cases())


def test_a_planted_allocation_is_measured() -> None:
    done = subprocess.run([sys.executable, "-c", PLANTED], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(200e6, rel=0.1)


@pytest.mark.requires("torch")
def test_a_child_measures_the_logits_of_softmax() -> None:
    case = case_of("softmax", 2048)
    logits = 4 * 2 * 2048**2
    peak = peak_memory(case, None, threads=1, memory_arena=True).peak_bytes
    assert peak is not None
    assert 2 * logits < peak < 5 * logits
    assert peak < 1.5 * memory.needed_bytes(case)


@pytest.mark.requires("torch")
def test_a_child_that_fails_says_why() -> None:
    case = BenchCase(**{**vars(case_of("lsh")), "options": {"num_hashes": 0}})
    outcome = peak_memory(case, None, threads=1, memory_arena=True)
    assert (outcome.status, outcome.reason.partition(";")[0]) == ("failed", "num_hashes is 0")


def test_what_does_not_fit_is_said_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("softmax", 16384)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 4_000_000_000)
    reason = memory.reason_too_large(case)
    assert reason == "would need about 6.48 GB of memory, and this machine has 4.00 GB free"
    assert memory.reason_too_large(case_of("linear", 16384)) is None
    assert not memory.arena_fits(case)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: None)
    assert memory.reason_too_large(case) is None


def test_the_machine_is_described_in_words() -> None:
    from effexport.base.environment import free_memory_bytes, memory_info, usable_cores

    assert usable_cores() >= 1
    if Path("/proc/meminfo").exists():
        free = free_memory_bytes()
        assert free is not None
        assert 0 < free <= memory_info()["MemTotal"]
