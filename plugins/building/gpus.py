"""The NVIDIA GPUs and the driver of this machine, found without a framework."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from effexport.plugins.building.programs import run_program

DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
_TIMEOUT_S = 20
# For machines without nvidia-smi, such as some containers. In a process of its own: a process that has initialised
# CUDA cannot fork others that use it.
_ASK_DRIVER = """
import ctypes, sys, uuid
driver = ctypes.CDLL(sys.argv[1])
number = ctypes.c_int
count, device, major, minor, name = number(), number(), number(), number(), ctypes.create_string_buffer(16)
def value(result):
    if result: sys.exit(1)
value(driver.cuInit(0))
value(driver.cuDeviceGetCount(ctypes.byref(count)))
for index in range(count.value):
    value(driver.cuDeviceGet(ctypes.byref(device), index))
    value(driver.cuDeviceGetUuid(name, device))
    value(driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device))
    value(driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device))
    print(f"{index}, GPU-{uuid.UUID(bytes=name.raw)}, {major.value}.{minor.value}")
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU. identifier: for CUDA_VISIBLE_DEVICES. architecture: such as "sm_90"."""

    identifier: str
    architecture: str

    @property
    def sm(self) -> int:
        """The number of the architecture, such as 90."""
        return int(self.architecture.removeprefix("sm_"))


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, from nvidia-smi, or else from the driver; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program := shutil.which("nvidia-smi"):
        query = (program, "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader")
        if found := parse_gpus(run_program(*query, timeout_s=_TIMEOUT_S).output, visible):
            return found
    if driver_cuda() is None:
        return ()
    # the driver itself heeds CUDA_VISIBLE_DEVICES
    return parse_gpus(run_program(sys.executable, "-P", "-c", _ASK_DRIVER, DRIVER, timeout_s=_TIMEOUT_S).output, None)


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


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA release that the NVIDIA driver of this machine is made for, such as (13, 0); None without a driver."""
    import ctypes

    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
