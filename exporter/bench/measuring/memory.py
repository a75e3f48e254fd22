"""Memory: what a case will need, before it is run; and its peak, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from effexport.bench.grid import logits_bytes
from effexport.bench.measuring.floor import traffic_bytes
from effexport.bench.measuring.machine import free_memory_bytes
from effexport.bench.results import Case
from effexport.units import memory

CHILD = "effexport.bench.measuring.memory_child"
# Plain formulas hold logits before and after the mask, and weights; and a few copies of what goes in and out.
COPIES_OF_LOGITS, COPIES_OF_INPUTS = 3, 4
# Leave some to everybody else.
USABLE_SHARE = 0.9
# ONNX Runtime's arena keeps a model's highest peak while others take their turns: only where that leaves most free.
ARENA_SHARE = 0.25
# A case that takes this long in the child is stuck.
CHILD_SECONDS = 900


class MemoryUnknownError(Exception):
    """The child process failed; the message is its last line."""


def needed_bytes(case: Case) -> int:
    """About what a plain implementation needs at its peak."""
    return COPIES_OF_LOGITS * logits_bytes(case) + COPIES_OF_INPUTS * traffic_bytes(case)


def reason_too_large(case: Case) -> str | None:
    """Why a case does not fit into the memory that is free; None where it does, or where nobody knows."""
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
            [sys.executable, "-m", CHILD],
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
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise MemoryUnknownError(said[-1]) from error
