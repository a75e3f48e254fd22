"""The GPUs of this machine, by architecture."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Gpu:
    """identifier: as CUDA_VISIBLE_DEVICES takes it. architecture: such as "sm_90"."""

    identifier: str
    architecture: str


def gpus_here() -> tuple[Gpu, ...]:
    """Those that this process may use, as nvidia-smi tells; none where there is no driver."""
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
    """text: lines of index, uuid, compute capability. visible: CUDA_VISIBLE_DEVICES, or None where it is not set."""
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
