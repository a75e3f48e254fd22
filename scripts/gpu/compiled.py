"""Kernels compiled for some architectures: what each needs, how many blocks fit on a GPU, and how it is launched."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from effexport.base.environment import usable_cores
from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import Op
from gpu.building import PLUGINS, call, emulating_toolchain, make_library
from gpu.device import Device, Kernels, SetupError, find_nvcc
from gpu.stages import Run

LANES = 32
REGISTERS = 65536
# ptxas leaves shared memory out if there is none
USAGE = {
    "registers": r"Used (\d+) registers",
    "shared_bytes": r"(\d+) bytes smem",
    "spilled_bytes": r"(\d+) bytes spill stores",
}


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel as ptxas reports them, and its number of tensor-core products (HMMA)."""

    registers: int
    shared_bytes: int
    spilled_bytes: int
    tensor_products: int = 0


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor. All have the same registers."""

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
    def warps(self) -> int:
        """Of a block."""
        return math.ceil(self.threads / LANES)


def compile_kernels(ops: Sequence[Op], architectures: Sequence[int], folder: Path) -> dict[tuple[str, int], Usage]:
    """(kernel, architecture) → Usage. A warning is an error. Raises SetupError if nvcc or nvdisasm is missing."""
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    known = call([nvcc, "--list-gpu-code"]).split() if nvcc else []
    if nvcc is None or not {f"sm_{architecture}" for architecture in architectures} <= {*known}:
        found = f"{nvcc} does not compile for all of SM {architectures}" if nvcc else "nvcc is missing"
        raise SetupError(f"{found}; expected CUDA 12.8 or later. Put its nvcc on PATH")

    def compile_one(op: Op, architecture: int) -> dict[tuple[str, int], Usage]:
        cubin = str(folder / f"{op.torch_name}_{architecture}.cubin")
        options = ("-std=c++17", "-O3", f"-I{PLUGINS}", f"-arch=sm_{architecture}", "--resource-usage", "-cubin")
        usages = parse_usage(call([nvcc, *options, "-Werror=all-warnings", str(PLUGINS / op.cuda_source), "-o", cubin]))
        products = tensor_products(call([nvdisasm, "-c", cubin]))
        return {key: replace(usage, tensor_products=products[key[0]]) for key, usage in usages.items()}

    works = [(op, architecture) for op in ops for architecture in architectures]
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = pool.map(lambda work: compile_one(*work), works)
        return {key: usage for usages in found for key, usage in usages.items()}


def parse_usage(text: str) -> dict[tuple[str, int], Usage]:
    """(kernel, architecture) → Usage, from the output of `nvcc --resource-usage`."""
    usages = {}
    for part in text.split("Compiling entry function ")[1:]:
        values = {name: re.search(pattern, part) for name, pattern in USAGE.items()}
        found = {name: int(match[1]) if match else 0 for name, match in values.items()}
        entry, _, architecture = part.partition("' for 'sm_")
        usages[entry.strip("'"), int(architecture.partition("'")[0])] = Usage(**found)
    return usages


def tensor_products(text: str) -> dict[str, int]:
    """Kernel → HMMA instructions in its code, each once, from the output of `nvdisasm -c`."""
    parts = text.split(".section\t.text.")[1:]
    return {part[: part.index(",")]: len(re.findall(r"\bHMMA\.", part)) for part in parts}


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


class Recorder:
    """Launches of the real launch_cuda, taken down in the emulation, where no block of them runs."""

    def __init__(self, folder: Path) -> None:
        run = Run(Device(emulated=True), folder, folder, (), "")
        make_library(run, emulating_toolchain("-O0"), folder / "kernels.so")
        self.kernels = Kernels(folder / "kernels.so", run.device)
        self.kernels.set_schedule(0, most_blocks=0)
        self.known = 0

    def arrays(self, op: Op, case: Case) -> list[torch.Tensor]:
        """Inputs and outputs, of memory that is never touched."""
        check = load_contract(op)
        with FakeTensorMode():
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in check.inputs(case, "cpu").values()]
        shapes += [(output.shape, output.dtype) for output in check.outputs(case).values()]
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]

    def launches(self, op: Op, case: Case) -> list[Launch]:
        scratch = torch.empty(self.kernels.scratch_bytes(op.torch_name, case), dtype=torch.uint8)
        self.kernels.launch(op.torch_name, case, self.arrays(op, case), scratch)
        found = self.kernels.recorded(self.known)
        self.known += len(found)
        return [Launch(entry, *sizes) for entry, sizes in found]
