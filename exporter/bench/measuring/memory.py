"""Memory: an estimate of what a case will need, and its peak, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from effexport.bench.grid import logits_bytes
from effexport.bench.measuring.floor import traffic_bytes
from effexport.bench.results import Case
from effexport.environment import free_memory_bytes
from effexport.units import memory

CHILD = "effexport.bench.measuring.memory_child"
# Plain formulas hold logits before and after the mask, weights, and a few copies of inputs and outputs.
COPIES_OF_LOGITS, COPIES_OF_INPUTS = 3, 4
# The rest is left to other processes.
USABLE_SHARE = 0.9
# ONNX Runtime's arena keeps the peak of a model while others run, so it is used only if it leaves most memory free.
ARENA_SHARE = 0.25
# A case that takes this long in the child is stuck.
CHILD_SECONDS = 900


class MemoryUnknownError(Exception):
    """The child process failed; the message is its last line."""


def needed_bytes(case: Case) -> int:
    """Roughly what a plain implementation needs at its peak."""
    return COPIES_OF_LOGITS * logits_bytes(case) + COPIES_OF_INPUTS * traffic_bytes(case)


def reason_too_large(case: Case) -> str | None:
    """Why a case does not fit into the free memory; None if it fits or that is unknown."""
    free, needed = free_memory_bytes(), needed_bytes(case)
    if free is None or needed <= USABLE_SHARE * free:
        return None
    return f"would need about {memory(needed)} of memory, and this machine has {memory(free)} free"


def arena_fits(case: Case) -> bool:
    free = free_memory_bytes()
    return free is None or needed_bytes(case) <= ARENA_SHARE * free


def peak_memory(case: Case, model: Path | None, *, threads: int, memory_arena: bool) -> int:
    """Peak bytes of a case. Raises MemoryUnknownError when the child fails."""
    request = {
        "case": asdict(case),
        "model": str(model) if model else None,
        "threads": threads,
        "memory_arena": memory_arena,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", CHILD],  # -P: nothing is imported from the current folder
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
        return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])
    except subprocess.TimeoutExpired as error:
        raise MemoryUnknownError(f"it ran for more than {CHILD_SECONDS} s") from error
    except (IndexError, ValueError, KeyError, TypeError) as error:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise MemoryUnknownError(lines[-1]) from error
