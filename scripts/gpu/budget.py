#!/usr/bin/env python3
"""Write docs/gpu_budget.md: what the CUDA kernels need, and lower bounds of their times. Needs no GPU.

Compiles all kernels, with nvcc, nvdisasm, a C++ compiler and PyTorch. Times are those of the last run in
docs/gpu_results, see scripts/gpu/runs.py.

nvdisasm is part of the CUDA toolkit, and of the package nvidia-cuda-nvdisasm. Exit status: 0, or 2 without a tool.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from gpu import ROOT

# isort: split
from pages import table

from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS
from gpu.bounds import Rates, bound_of
from gpu.building import call
from gpu.compiled import MULTIPROCESSOR, Launch, Recorder, Usage, compile_kernels
from gpu.device import SetupError, find_nvcc, require_torch
from gpu.goals import text_of
from gpu.runs import folders
from gpu.timing import KERNEL, goal_json

PAGE = ROOT / "docs" / "gpu_budget.md"
# those of other GPUs have the code of one of these
ARCHITECTURES = (75, 90, 120)
# Copies and products of halves were measured; multiprocessors, their highest clock and the cache are the data sheet's.
MULTIPROCESSORS = 132
GPUS = {
    "H100": Rates.of(copied=3.0e12, tensor=395e12, multiprocessors=MULTIPROCESSORS, clock_hz=1.98e9, cache_bytes=50e6),
    "H200": Rates.of(copied=4.3e12, tensor=395e12, multiprocessors=MULTIPROCESSORS, clock_hz=1.98e9, cache_bytes=60e6),
}
# The architecture of both, whose main loops are shown; by field of Usage, the columns.
SHOWN = 90
LOOP = {
    "issued": "instructions",
    "floats": "floats",
    "integers": "integers",
    "special": "special functions",
    "accesses": "accesses",
    "loop_products": "tensor cores",
}
TEMPLATE = """\
# What the CUDA kernels need, and what bounds them

Written by `python3 scripts/gpu/budget.py`, which needs no GPU: from what nvcc {cuda} and nvdisasm say of the kernels,
and from what operators declare of them (`work` in `plugins/OPERATOR/contract.py`).

## Operators

A bound is the least time that a call can take as its kernels are written: the longest of four. It is no prediction:
kernels also issue instructions, and wait for memory, for barriers and for each other.

* **memory**: inputs and outputs once, scratch memory when it is written, and what a launch reads of what an earlier one
  has read or written, beyond what the L2 cache holds. "Moved" is all of it, with nothing in the cache.
* **tensor cores** and **multiply-adds** of float32, padding of tiles included.
* **shared memory**: 128 bytes for an access of a warp, and as many more as its lanes reach other words. Each
  multiprocessor moves 128 bytes a clock. Conflicts of banks do not count.

An H100 copies 3.0 TB/s and an H200 4.3 TB/s. Both do 395 · 10¹² multiply-adds of halves a second in a large product
(these three were measured) and have 132 multiprocessors at 1.98 GHz at most. `scripts/gpu` measures the rates of the
GPU it runs on, and goals are multiples of the bound that follows from them. Times in µs; {measured}.

{operators}

## Launches

What each case launches on an H100 or H200. Blocks at a time: those that fit on a multiprocessor. A wave is as many as
fit on all of them; of 2.1 waves, the last leaves nine tenths of the GPU idle, if all blocks take as long.

{launches}

## Kernels

Three numbers are for SM 75 / 90 / 120, one number for all of them. Blocks and warps are those that fit on a
multiprocessor at a time. HMMA: products on tensor cores in the machine code, each counted once.

The last seven columns are of the main loop, for SM 90: instructions of a warp in one turn, on all ways through it, of
which a warp takes one. Loops inside it do not count. A scheduler, one of four in a multiprocessor, issues one a clock;
integers, logic, comparisons and moves take two clocks of their pipe, special functions eight, an access of up to 128
bytes of memory four, and a product on tensor cores 5.4, which is the measured rate above. The busiest has most clocks.

{resources}
"""


def operators(recorder: Recorder, measured: dict[tuple[str, str], float]) -> str:
    head = ["operator and case", "launches", "in and out, MB", "moved, MB", "tensor cores, 10⁹", "multiply-adds, 10⁹"]
    head += ["shared memory, GB", *(f"bound, {name}" for name in GPUS), "goal", "measured"]
    rows = []
    for op in CUDA_OPS.values():
        check = load_contract(op)
        for timed in check.timed:
            work = check.work(timed.case)
            in_and_out = sum(tensor.nbytes for tensor in recorder.arrays(op, timed.case))
            bounds = [bound_of(work, in_and_out, rates) for rates in GPUS.values()]
            us = measured.get((op.torch_name, timed.case.name))
            cells = [
                f"`{op.torch_name}` {timed.case.name}",
                len(recorder.launches(op, timed.case)),
                number(in_and_out / 1e6),
                number(bounds[0].moved / 1e6),
                *(number(amount / 1e9) for amount in (work.tensor, work.fused, work.shared)),
                *(f"{number(bound.us)}, {bound.resource}" for bound in bounds),
                "; ".join(text_of(goal_json(goal)) for goal in timed.goals),
                "" if us is None else number(us),
            ]
            rows.append(cells)
    return table(head, rows)


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 else "0"


def resources(recorder: Recorder, usages: dict[tuple[str, int], Usage]) -> str:
    head = ["kernel", "threads", "shared memory", "registers", "spilled bytes", "blocks (warps)", "HMMA"]
    rows = []
    launches = first_launches(recorder)
    for entry in sorted({entry for entry, _ in usages}):
        launch = launches[entry]
        each_usage = [usages[entry, architecture] for architecture in ARCHITECTURES]
        cells = [
            f"`{entry.removeprefix('effexport_')}`",
            launch.threads,
            launch.shared_bytes,
            each(usage.registers for usage in each_usage),
            each(usage.spilled_bytes for usage in each_usage),
            each(map(occupancy, ARCHITECTURES, each_usage, [launch] * len(each_usage))),
            each(usage.tensor_products for usage in each_usage),
            *(getattr(usages[entry, SHOWN], name) for name in LOOP),
            LOOP[usages[entry, SHOWN].busiest],
        ]
        rows.append(cells)
    return table([*head, *LOOP.values(), "busiest"], rows)


def launches(recorder: Recorder, usages: dict[tuple[str, int], Usage]) -> str:
    rows = []
    for op in CUDA_OPS.values():
        for timed in load_contract(op).timed:
            for launch in recorder.launches(op, timed.case):
                usage = usages[launch.entry, SHOWN]
                resident = MULTIPROCESSOR[SHOWN].resident_blocks(usage, launch.threads, launch.shared_bytes)
                waves = number(launch.blocks / (resident * MULTIPROCESSORS))
                sizes = (launch.blocks, launch.threads, usage.registers, resident, waves)
                rows.append((f"`{launch.entry.removeprefix('effexport_')}`", timed.case.name, *sizes))
    return table(("kernel", "case", "blocks", "threads", "registers", "blocks at a time", "waves"), rows)


def first_launches(recorder: Recorder) -> dict[str, Launch]:
    """One launch of every kernel, in the first of its operator's cases that has one, in each type."""
    found: dict[str, Launch] = {}
    for op in CUDA_OPS.values():
        check = load_contract(op)
        cases = [timed.case for timed in check.timed] + [*check.checked, *check.small]
        for case in (replace(case, dtype=dtype) for case in cases for dtype in op.element_types):
            for launch in recorder.launches(op, case):
                found.setdefault(launch.entry, launch)
    return found


def occupancy(architecture: int, usage: Usage, launch: Launch) -> str:
    blocks = MULTIPROCESSOR[architecture].resident_blocks(usage, launch.threads, launch.shared_bytes)
    return f"{blocks} ({blocks * launch.warps})"


def each(values: Iterable[object]) -> str:
    """The values of all architectures, or the one that they share."""
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def measurements() -> tuple[str, dict[tuple[str, str], float]]:
    """The hardware and date of the last run, and µs by operator and case. Both empty without a run."""
    paths = [folder / "timing.json" for folder in folders() if (folder / "timing.json").is_file()]
    if not paths:
        return "", {}
    stage = json.loads(paths[-1].read_text(encoding="utf-8"))
    found = {
        (timing["op"], timing["case"]): timing["readings"][KERNEL]["us"]
        for timing in stage["details"].get("timings", [])
        if timing.get("readings", {}).get(KERNEL, {}).get("us")
    }
    return f"{stage['hardware']} on {stage['date']}", found


def page() -> str:
    """Raises SetupError if a tool is missing."""
    require_torch()
    where, measured = measurements()
    with tempfile.TemporaryDirectory() as folder:
        usages = compile_kernels(list(CUDA_OPS.values()), ARCHITECTURES, Path(folder))
        recorder = Recorder(Path(folder))
        cuda = re.search(r"release ([\d.]+)", call([find_nvcc() or "", "--version"]))
        return TEMPLATE.format(
            cuda=cuda[1] if cuda else "unknown",
            measured=f"measured on one {where}" if where else "no GPU has measured any yet",
            operators=operators(recorder, measured),
            launches=launches(recorder, usages),
            resources=resources(recorder, usages),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=PAGE, metavar="FILE", help="default: docs/gpu_budget.md")
    options = parser.parse_args()
    try:
        text = page()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
