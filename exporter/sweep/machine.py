"""This machine: how many cells it builds at a time, and its GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from effexport.environment import memory_info, usable_cores

# Memory for building the default encoder, with room to spare.
CELL_BYTES = 2 * 2**30
_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Gpu:
    """A GPU. identifier: for CUDA_VISIBLE_DEVICES. architecture: such as "sm_90"."""

    identifier: str
    architecture: str


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, from nvidia-smi; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """text: lines of index, uuid, compute capability. visible: CUDA_VISIBLE_DEVICES, None if not set."""
    found = []
    chosen = None if visible is None else [word.strip() for word in visible.split(",")]
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not parts[2].replace(".", "").isdecimal():
            continue
        index, identifier, capability = parts
        if chosen is None or index in chosen or any(word and identifier.startswith(word) for word in chosen):
            found.append(Gpu(identifier, f"sm_{capability.replace('.', '')}"))
    return tuple(found)


def jobs_of_machine() -> int:
    """One cell per core, but no more than fit into the free memory."""
    free = memory_info().get("MemAvailable")
    return max(1, usable_cores() if free is None else min(usable_cores(), free // CELL_BYTES))
