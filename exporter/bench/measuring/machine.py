"""The machine of a benchmark: processor, memory, GPU."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

CPU_INFO, MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
# Limit and use of a container's memory, in versions 2 and 1 of control groups.
CONTAINER_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory and GPU, in words."""
    return {
        "processor": processor_name(),
        "cores": str(usable_cores()),
        "memory": f"{memory_info().get('MemTotal', 0) / 1e9:.0f} GB",
        "gpu": gpu_name() or "none",
        "system": platform.system(),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    try:
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def memory_info() -> dict[str, int]:
    """Fields of /proc/meminfo in bytes; empty if there is no such file."""
    try:
        lines = MEMORY_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[1].isdecimal()}


def free_memory_bytes() -> int | None:
    """Memory available without swapping and within the container's limit; None if unknown."""
    free = [memory_info()["MemAvailable"]] if "MemAvailable" in memory_info() else []
    for limit_file, used_file in CONTAINER_LIMITS:
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        if limit.isdecimal() and used.isdecimal():
            free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def gpu_name() -> str | None:
    """The GPU that PyTorch sees, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def has_compiler() -> bool:
    """Whether a C++ compiler is installed, which torch.compile needs on the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))
