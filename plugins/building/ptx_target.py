"""What PTX needs to run: GPUs of some architecture or later, and a driver that knows its instruction set."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from effexport.plugins.errors import LibraryError

# What PTX is made for. 75 is Turing, the oldest GPU that the kernel library and TensorRT 11 support. From 80 on, GPUs
# copy to shared memory in the background, multiply bfloat16 on tensor cores, and float16 in half as many instructions.
# The kernels use nothing newer.
ARCHITECTURES = (75, 80)
# PTX of CUDA 13.0. A driver refuses PTX that is newer than itself, and the kernels need nothing newer.
MAX_ISA = (9, 0)

Version = tuple[int, int]


@dataclass(frozen=True)
class PtxTarget:
    """What the PTX in an engine needs: a GPU of this architecture or later, such as 80, and a driver of this CUDA
    release or later, such as "13.0", because it is in this version of the instruction set."""

    architecture: int
    isa: str
    driver: str

    def __str__(self) -> str:
        return f"SM {self.architecture} or later, and a driver of CUDA {self.driver} or later (PTX {self.isa})"


def ptx_target(architecture: int, isa: Version) -> PtxTarget:
    return PtxTarget(architecture, text_of(isa), text_of(cuda_of_isa(isa)))


def ptx_architecture(compute_capabilities: Collection[int]) -> int:
    """The best architecture for PTX that all of these GPUs can run.

    A driver translates the PTX of an architecture for itself and for every later one. So the oldest GPU decides, and of
    the architectures up to it, the latest uses most of what it can. Raises LibraryError if it is older than all.
    """
    oldest = min(compute_capabilities)
    fitting = [architecture for architecture in ARCHITECTURES if architecture <= oldest]
    if not fitting:
        raise LibraryError(f"the GPU is SM {oldest}; the kernels expect SM {ARCHITECTURES[0]} or later")
    return max(fitting)


def isa_of(ptx: str) -> Version:
    """The version of the instruction set that PTX declares. Raises LibraryError if it declares none."""
    version = re.search(r"^\.version\s+(\d+)\.(\d+)\s*$", ptx, re.MULTILINE)
    if version is None:
        raise LibraryError("the CUDA compiler made PTX without a .version; expected one. Try another CUDA toolkit")
    return int(version[1]), int(version[2])


def cuda_of_isa(isa: Version) -> Version:
    """The CUDA release that brought a version of the instruction set, from 7.0 on (PTX ISA, "Release Notes")."""
    major, minor = isa
    skipped = major == 8 and minor >= 6  # CUDA 12.6 brought none
    return major + 4, minor + skipped


def text_of(version: Version) -> str:
    return ".".join(map(str, version))
