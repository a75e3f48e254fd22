"""Kernels compiled for some architectures: what each needs, how many blocks fit on a GPU, and how it is launched."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx
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


# Instructions by what they occupy besides a scheduler. IMAD takes a half of the pipe of multiplications.
PIPES = {
    "floats": "FADD FFMA FMUL HADD2 HFMA2 HMUL2 IMAD",
    "integers": (
        "BMSK F2FP FMNMX FMNMX3 FSEL FSET FSETP HMNMX2 HSETP2 I2FP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 "
        "PRMT R2P SEL SGXT SHF SHL SHR VIADD VIADDMNMX VIMNMX VOTE"
    ),
    "special": "BREV F2F F2I FLO FRND I2F I2I MUFU POPC",
    "accesses": "ATOM ATOMG ATOMS LD LDG LDGSTS LDL LDS LDSM RED SHFL ST STG STL STS",
    "loop_products": "HMMA IMMA",
}
# The instructions that PTX calls griddepcontrol, and those that access global memory.
GRID_CONTROL = {"ACQBULK": "wait", "PREEXIT": "launch_dependents"}
GLOBAL_ACCESSES = ("LDG", "STG", "LDGSTS", "LD", "ST", "RED", "REDG", "ATOM", "ATOMG")
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}
# Clocks of a scheduler, one of four in a multiprocessor, for the instruction of a warp on SM 90: CUDA C++ Programming
# Guide, "Arithmetic Instructions". Of products on tensor cores: as fast as large ones were measured, see budget.py.
CLOCKS = {"issued": 1.0, "floats": 1.0, "integers": 2.0, "special": 8.0, "accesses": 4.0, "loop_products": 5.4}


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel as ptxas reports them, and its number of tensor-core products (HMMA).

    The others count instructions of a warp in the kernel's main loop, on all ways through it: all of them, and those of
    PIPES. accesses: of memory, in parts of 128 bytes. begins: what orders the launch, before the first access.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    tensor_products: int = 0
    issued: int = 0
    floats: int = 0
    integers: int = 0
    special: int = 0
    accesses: int = 0
    loop_products: int = 0
    begins: str = ""

    @property
    def busiest(self) -> str:
        """The name in CLOCKS of what the main loop keeps busy for the most clocks."""
        return max(CLOCKS, key=lambda name: getattr(self, name) * CLOCKS[name])


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
        code = machine_code(call([nvdisasm, "-c", cubin]))
        return {key: replace(usage, **counts_of(code[key[0]])) for key, usage in usages.items()}

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


# A label, or an instruction: its predicate, opcode and operands.
LINE = re.compile(r"^\s*(?:(\.\w+):|/\*\w+\*/\s+(@!?\w+ )?\s*([\w.]+)(.*?);)", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction of machine code. follows: the indices of those that may be next."""

    opcode: str
    follows: tuple[int, ...]

    @property
    def pipe(self) -> str | None:
        return PIPE_OF.get(self.opcode.partition(".")[0])

    @property
    def accesses(self) -> int:
        """The parts of 128 bytes that a warp accesses: of LDSM.M88.4 and LDS.128, four."""
        width = re.search(r"\.(64|128|M88\.2|M88\.4|MT88\.2|MT88\.4)\b", self.opcode)
        return {"64": 2, "2": 2, "128": 4, "4": 4}[width[1].rpartition(".")[2]] if width else 1


def machine_code(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel, from the output of `nvdisasm -c`."""
    return {part[: part.index(",")]: _instructions(part) for part in text.split(".section\t.text.")[1:]}


def _instructions(text: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    lines: list[tuple[str, str, str]] = []
    for label, predicate, opcode, operands in LINE.findall(text):
        if label:
            labels[label] = len(lines)
        else:
            lines.append((predicate, opcode, operands))
    found = []
    for i, (predicate, opcode, operands) in enumerate(lines):
        jump = re.search(r"`\((\.\w+)\)", operands) if opcode.startswith("BRA") else None
        ends = opcode.startswith(("BRA", "EXIT", "RET")) and not predicate and "UP" not in operands
        follows = [labels[jump[1]]] if jump else []
        found.append(Instruction(opcode, tuple(follows + [i + 1] * (not ends and i + 1 < len(lines)))))
    return found


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop, without those of the loops inside it. depth: of loops around it."""

    instructions: frozenset[int]
    depth: int


def loops_of(code: Sequence[Instruction]) -> list[Loop]:
    """All loops, each the strongly connected rest of another without the ways back to its first instruction."""
    graph = networkx.DiGraph((i, following) for i, instruction in enumerate(code) for following in instruction.follows)

    def loops_within(within: networkx.DiGraph, depth: int) -> list[Loop]:
        found = []
        for part in networkx.strongly_connected_components(within):
            body = within.subgraph(part).copy()
            if body.number_of_edges() == 0:
                continue
            first = min((to for start, to in graph.in_edges(part) if start not in part), default=min(part))
            body.remove_edges_from([*body.in_edges(first)])
            inner = loops_within(body, depth + 1)
            found += [Loop(frozenset(part).difference(*(loop.instructions for loop in inner)), depth), *inner]
        return found

    return loops_within(graph, 0)


def counts_of(code: Sequence[Instruction]) -> dict[str, Any]:
    """Fields of Usage. The main loop has most products on tensor cores; among equals, most arithmetic of floats, where
    a loop in another counts eight times as much. Without loops, it is the whole kernel."""

    def counts(loop: Loop) -> dict[str, int]:
        own = [code[i] for i in loop.instructions]
        amounts = Counter(instruction.pipe for instruction in own)
        amounts["accesses"] = sum(instruction.accesses for instruction in own if instruction.pipe == "accesses")
        return {"issued": len(own)} | {pipe: amounts[pipe] for pipe in PIPES}

    found = [(loop.depth, counts(loop)) for loop in loops_of(code) or [Loop(frozenset(range(len(code))), 0)]]
    _, main = max(found, key=lambda x: (x[1]["loop_products"], 8 ** x[0] * x[1]["floats"], x[1]["issued"]))
    opcodes = [x.opcode.partition(".")[0] for x in code]
    before = itertools.takewhile(lambda opcode: opcode not in GLOBAL_ACCESSES, opcodes)
    begins = " ".join(GRID_CONTROL[opcode] for opcode in before if opcode in GRID_CONTROL)
    return {"tensor_products": sum(x.opcode.startswith("HMMA.") for x in code), "begins": begins, **main}


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
