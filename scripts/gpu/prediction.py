"""How long kernels should take on an H200, from their machine code and from launches in the emulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from effexport.plugins.gpu_check import LOADED, PRODUCTS, Case, Work, load_gpu_check
from effexport.plugins.ops import Op
from gpu.building import emulating_toolchain, make_library
from gpu.compiled import Launch
from gpu.device import Device, Kernels
from gpu.sass import INSTRUCTIONS, Code, Cost, Preferred
from gpu.stages import Run

# One H200.
MULTIPROCESSORS, SCHEDULERS = 132, 4
CLOCKS_GHZ = (1.98, 1.75)
# A copy and products of halves, measured; float32 without tensor cores, from the data sheet.
BYTES_PER_US = 4.3e6
FLOPS_PER_US = {"float32": 67e6, "float16": 790e6, "bfloat16": 790e6}
# How long one HMMA of 2048 multiply-adds occupies a quarter of a multiprocessor: mma.sync has half of wgmma's rate.
HMMA_CLOCKS = 8
# What is added for every launch in a CUDA graph.
LAUNCH_US = 2.0
L2_BYTES = 60e6
# How exactly the amounts of work are met, and in how many steps at most.
CLOSE, MOST_STEPS = 0.01, 20


def executed(code: Code, launch: Launch, work: Work) -> Cost:
    """What all warps of a launch execute together."""
    most = repeated(code, launch, work, loads=True)
    if work.loaded is None:
        return most
    least = repeated(code, launch, work, loads=False)
    span = most[LOADED] - least[LOADED]
    share = min(1.0, max(0.0, (work.loaded - least[LOADED]) / span)) if span else 1.0
    return most * share + least * (1 - share)


def repeated(code: Code, launch: Launch, work: Work, loads: bool) -> Cost:
    """The same, with one decision for all loads that depend on conditions."""
    amounts = {code.products if name == PRODUCTS else name: of_all for name, of_all in work.amounts.items()}
    inner = dict.fromkeys(amounts, 1.0)

    def trips(depth: int, loop: Cost) -> float:
        done = next((name for name in amounts if loop[name]), None)
        if done is None:
            return 1.0
        return work.trips[depth] if depth < len(work.trips) else inner[done]

    preferred = Preferred(PRODUCTS in work.amounts, loads)
    for name, of_all in amounts.items():
        wanted = of_all / launch.warps
        done: dict[float, float] = {}
        for once in (0.0, 1.0):
            inner[name] = once
            done[once] = code.executed(trips, preferred, [])[name]
        if done[1] <= done[0]:
            continue
        # exact unless an inner loop lies in another one; then what is done grows with a power of the repetitions
        inner[name] = max(0.0, wanted - done[0]) / (done[1] - done[0])
        for _ in range(MOST_STEPS):
            reached = code.executed(trips, preferred, [])[name]
            if reached <= done[0] or abs(reached - wanted) <= CLOSE * wanted:
                break
            inner[name] *= (wanted / reached) ** 0.5
    return code.executed(trips, preferred, []) * launch.warps


def busy_us(launch: Launch, cost: Cost) -> tuple[float, float]:
    """How long the multiprocessor with most blocks issues instructions, or its tensor cores multiply.

    At the higher and at the lower clock. cost: what all warps execute.
    """
    blocks = math.ceil(launch.blocks / MULTIPROCESSORS)
    schedulers = min(SCHEDULERS, blocks * launch.warps // launch.blocks)
    clocks = max(cost[INSTRUCTIONS], cost["HMMA"] * HMMA_CLOCKS) * blocks / launch.blocks / schedulers
    fast, slow = (clocks / (ghz * 1e3) for ghz in CLOCKS_GHZ)
    return fast, slow


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
        check = load_gpu_check(op)
        with FakeTensorMode():
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in check.inputs(case, "cpu").values()]
        shapes += [(output.shape, output.dtype) for output in check.outputs(case).values()]
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]

    def scratch_bytes(self, op: Op, case: Case) -> int:
        return self.kernels.scratch_bytes(op.torch_name, case)

    def launches(self, op: Op, case: Case) -> list[Launch]:
        scratch = torch.empty(self.scratch_bytes(op, case), dtype=torch.uint8)
        self.kernels.launch(op.torch_name, case, self.arrays(op, case), scratch)
        found = self.kernels.recorded(self.known)
        self.known += len(found)
        return [Launch(entry, *sizes) for entry, sizes in found]


@dataclass(frozen=True)
class Row:
    """One case on an H200. Times in µs; busy at the higher and the lower clock, and None if it is not predicted."""

    op: Op
    case: Case
    launches: list[Launch]
    bytes: int
    scratch_bytes: int
    flops: float
    costs: list[Cost] | None

    @property
    def memory_us(self) -> float:
        """Inputs and outputs once; scratch memory is written and read, if the L2 cache does not hold it."""
        return (self.bytes + 2 * max(0, self.scratch_bytes - L2_BYTES)) / BYTES_PER_US

    @property
    def roofline_us(self) -> float:
        return max(self.bytes / BYTES_PER_US, self.flops / FLOPS_PER_US.get(self.case.dtype, float("inf")))

    @property
    def predicted_us(self) -> tuple[float, float] | None:
        if self.costs is None:
            return None
        busy = [busy_us(launch, cost) for launch, cost in zip(self.launches, self.costs, strict=True)]
        fast, slow = (max(self.memory_us, sum(times)) + LAUNCH_US * len(busy) for times in zip(*busy, strict=True))
        return fast, slow


def row_of(recorder: Recorder, codes: Mapping[str, Code], op: Op, case: Case) -> Row:
    """codes: the machine code of all kernels for the H200."""
    check = load_gpu_check(op)
    launches, work = recorder.launches(op, case), check.work(case)
    moved = sum(tensor.nbytes for tensor in recorder.arrays(op, case))
    costs = [executed(codes[launch.entry], launch, work[launch.name]) for launch in launches if launch.name in work]
    complete = costs if len(costs) == len(launches) else None
    return Row(op, case, launches, moved, recorder.scratch_bytes(op, case), check.flops(case), complete)
