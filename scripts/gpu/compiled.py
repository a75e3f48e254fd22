"""Kernels compiled for some architectures: their resources, their machine code, and how many blocks fit on a GPU."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from effexport.environment import usable_cores
from effexport.plugins.ops import FLOAT_TYPES, Op
from gpu.building import PLUGINS, call
from gpu.device import SetupError, find_nvcc
from gpu.sass import LANES, Code, parse_graphs

REGISTERS = 65536
# ptxas leaves shared memory out if there is none
USAGE = {
    "registers": r"Used (\d+) registers",
    "shared_bytes": r"(\d+) bytes smem",
    "spilled_bytes": r"(\d+) bytes spill stores",
}


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one kernel."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor can hold at a time. All have the same registers."""

    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int  # of shared memory, for every block

    def resident_blocks(self, usage: Usage, threads: int, shared_bytes: int) -> int:
        """CUDA C++ Programming Guide, "Compute Capabilities": registers are given to warps, 256 at a time."""
        warps = math.ceil(threads / LANES)
        warps_by_registers = REGISTERS // (math.ceil(usage.registers * LANES / 256) * 256) // 4 * 4
        shared = shared_bytes + usage.shared_bytes + self.reserved_bytes
        by_shared = self.shared_bytes // shared if shared else self.blocks
        return min(self.warps // warps, warps_by_registers // warps, by_shared, self.blocks)


MULTIPROCESSOR = {
    75: Multiprocessor(32, 16, 64 << 10, 0),
    80: Multiprocessor(64, 32, 164 << 10, 1 << 10),
    90: Multiprocessor(64, 32, 228 << 10, 1 << 10),
    120: Multiprocessor(48, 24, 100 << 10, 1 << 10),
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel. shared_bytes: dynamic shared memory of a block."""

    entry: str
    blocks: int
    threads: int
    shared_bytes: int

    @property
    def name(self) -> str:
        """Of the kernel, without its element type."""
        return re.sub(rf"_({'|'.join(FLOAT_TYPES)})$", "", self.entry)

    @property
    def warps(self) -> int:
        """Of all blocks."""
        return self.blocks * math.ceil(self.threads / LANES)


@dataclass(frozen=True)
class Compiled:
    """All kernels of some operators: resources by kernel and architecture, and their machine code."""

    usages: dict[tuple[str, int], Usage]
    codes: dict[tuple[str, int], Code]

    def at(self, architecture: int) -> dict[str, Code]:
        return {entry: code for (entry, compiled), code in self.codes.items() if compiled == architecture}


def compile_kernels(ops: Sequence[Op], architectures: Sequence[int], folder: Path) -> Compiled:
    """Raises SetupError if nvcc or nvdisasm is missing."""
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    known = call([nvcc, "--list-gpu-code"]).split() if nvcc else []
    if nvcc is None or not {f"sm_{architecture}" for architecture in architectures} <= {*known}:
        found = f"{nvcc} does not compile for all of SM {architectures}" if nvcc else "nvcc is missing"
        raise SetupError(f"{found}; expected CUDA 12.8 or later. Put its nvcc on PATH")

    def compile_one(op: Op, architecture: int) -> tuple[str, str]:
        cubin = str(folder / f"{op.torch_name}_{architecture}.cubin")
        options = ("-std=c++17", "-O3", f"-I{PLUGINS}", f"-arch=sm_{architecture}", "--resource-usage", "-cubin")
        return call([nvcc, *options, str(PLUGINS / op.cuda_source), "-o", cubin]), call([nvdisasm, "-bbcfg", cubin])

    works = [(op, architecture) for op in ops for architecture in architectures]
    with ThreadPoolExecutor(usable_cores()) as pool:
        texts = list(pool.map(lambda work: compile_one(*work), works))
    usages: dict[tuple[str, int], Usage] = {}
    codes: dict[tuple[str, int], Code] = {}
    for (_, architecture), (resources, graphs) in zip(works, texts, strict=True):
        usages.update(parse_usage(resources))
        codes.update({(entry, architecture): code for entry, code in parse_graphs(graphs).items()})
    return Compiled(usages, codes)


def parse_usage(text: str) -> dict[tuple[str, int], Usage]:
    """(kernel, architecture) → Usage, from the output of `nvcc --resource-usage`."""
    usages = {}
    for part in text.split("Compiling entry function ")[1:]:
        values = {name: re.search(pattern, part) for name, pattern in USAGE.items()}
        found = {name: int(match[1]) if match else 0 for name, match in values.items()}
        entry, _, architecture = part.partition("' for 'sm_")
        usages[entry.strip("'"), int(architecture.partition("'")[0])] = Usage(**found)
    return usages


def find_nvdisasm() -> str:
    """The toolkit's, or the one of a package. Raises SetupError if there is none."""
    beside = [Path(nvcc).resolve().parent] if (nvcc := find_nvcc()) else []
    packages = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (packages.submodule_search_locations or [] if packages else [])]
    for folder in [*beside, *(path for base in folders for path in base.glob("*/bin"))]:
        if found := shutil.which("nvdisasm", path=folder):
            return found
    if found := shutil.which("nvdisasm"):
        return found
    raise SetupError("nvdisasm is missing; expected it in the CUDA toolkit. Or: pip install nvidia-cuda-nvdisasm")
