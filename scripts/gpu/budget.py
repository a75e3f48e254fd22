#!/usr/bin/env python3
"""Write docs/gpu_budget.md: what the CUDA kernels need, and how long they should take on an H200. Needs no GPU.

    python3 scripts/gpu/budget.py                 # compiles all kernels; needs nvcc, nvdisasm, a C++ compiler, PyTorch
    python3 scripts/gpu/budget.py -r results      # with the times of `python3 scripts/gpu -o results`, from a GPU

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
from effexport.plugins.gpu_check import PRODUCTS, Work, load_gpu_check
from effexport.plugins.ops import OPS
from gpu.building import call
from gpu.compiled import MULTIPROCESSOR, Compiled, Launch, Usage, compile_kernels
from gpu.device import SetupError, find_nvcc, require_torch
from gpu.estimates import ESTIMATES, LAYERS
from gpu.goals import text_of
from gpu.prediction import Recorder, row_of
from gpu.sass import INSTRUCTIONS, Cost
from gpu.timing import KERNEL, goal_json

PAGE = ROOT / "docs" / "gpu_budget.md"
ARCHITECTURES = (75, 80, 90, 120)
PREDICTED = 90  # that of the H200
TEMPLATE = """\
# What the CUDA kernels need, and how long they should take

Written by `python3 scripts/gpu/budget.py`, which needs no GPU, from what nvcc {cuda} and nvdisasm say of the kernels.

**Predicted times are predictions.** The multiprocessor with most blocks issues four instructions per clock, at 1.75 to
1.98 GHz; an HMMA, the tensor cores' product of 16 × 8 × 16, takes one of its four parts 8 clocks. All inputs and
outputs move once at 4.3 TB/s, and scratch memory beyond the L2 cache twice. The slower of the two counts, and 2 µs for
every launch. How often loops are repeated follows from the sizes (`work` in `plugins/OPERATOR/gpu_check.py`); blocks
and threads are those of the real launches. Waiting is not predicted: for memory, at barriers, or because a
multiprocessor has few warps. Such kernels take longer, small ones above all; expect ± 40 % otherwise.

Roofline: inputs and outputs at 4.3 TB/s, or the definition's floating-point operations at 790 TFLOP/s in half types and
67 TFLOP/s in float32, whichever takes longer. IterativePinv up to m = 64 may take less: it multiplies float32 numbers
as halves on tensor cores. A block of it waits for chains of products, which the prediction leaves out. The columns of
dense attention (PyTorch's flash or cuDNN kernels) and of PyTorch are estimates too.

## Operators on one H200

Times in µs; {measured}.

{predictions}

## Attention layers on one H200

Between the projections, 8 heads × 64, batch 1, float16; every fused operator and every other launch, one after another.

{layers}

## Kernels

Four numbers are for SM 75 / 80 / 90 / 120, one number for all of them. Blocks and warps are those that fit on a
multiprocessor at a time. The main loop is the innermost one with at least half of all products, or of all loads from
global memory; its instructions are those of one time through it, without rare cases.

{resources}
"""


def predictions(recorder: Recorder, compiled: Compiled, measured: dict[tuple[str, str], float]) -> list[str]:
    lines = [
        "| operator and case | launches | MB | GFLOP | instructions of warps, million | HMMA, million | roofline "
        "| predicted | goal | dense attention | PyTorch | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for op in OPS.values():
        for timed in load_gpu_check(op).timed:
            row = row_of(recorder, compiled.at(PREDICTED), op, timed.case)
            total = sum(row.costs or [], Cost())
            us = measured.get((op.torch_name, timed.case.name))
            cells = [
                f"`{op.torch_name}` {timed.case.name}",
                str(len(row.launches)),
                number(row.bytes / 1e6),
                number(row.flops / 1e9),
                *(number(total[name] / 1e6) if row.costs else "–" for name in (INSTRUCTIONS, "HMMA")),
                number(row.roofline_us),
                span(row.predicted_us),
                "; ".join(text_of(goal_json(goal)) for goal in timed.goals),
                *ESTIMATES.get((op.torch_name, timed.case.sizes, timed.case.dtype), ("–", "–")),
                "" if us is None else number(us),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def span(us: tuple[float, float] | None) -> str:
    return "–" if us is None else "–".join(dict.fromkeys(number(one) for one in us))


def layers(recorder: Recorder, compiled: Compiled) -> list[str]:
    lines = [
        "| layer | launches | predicted | goal | dense attention | `torch.compile` |",
        "|---|---|---|---|---|---|",
    ]
    for layer in LAYERS:
        rows = [(row_of(recorder, compiled.at(PREDICTED), OPS[name], case), times) for name, case, times in layer.parts]
        launches = layer.others + sum(len(row.launches) * times for row, times in rows)
        known = [(row.predicted_us, times) for row, times in rows if row.predicted_us is not None]
        fast, slow = (layer.others_us + sum(us[end] * times for us, times in known) for end in (0, 1))
        predicted = span((fast, slow) if len(known) == len(rows) else None)
        cells = (layer.name, str(launches), predicted, f"at most {layer.at_most_us} µs", layer.dense, layer.compiled)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def resources(recorder: Recorder, compiled: Compiled) -> list[str]:
    lines = [
        "| kernel | threads | shared memory | registers | spilled bytes | blocks (warps) | instructions "
        "| of the main loop | HMMA | of the main loop |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    launches = first_launches(recorder)
    for entry in sorted({entry for entry, _ in compiled.usages}):
        launch, work = launches.get(entry, (None, None))
        products = work is not None and PRODUCTS in work.amounts
        usages = [compiled.usages[entry, architecture] for architecture in ARCHITECTURES]
        codes = [compiled.codes[entry, architecture] for architecture in ARCHITECTURES]
        cells = [
            f"`{entry.removeprefix('effexport_')}`",
            str(launch.threads) if launch else "–",
            str(launch.shared_bytes) if launch else "–",
            each(usage.registers for usage in usages),
            each(usage.spilled_bytes for usage in usages),
            each(map(occupancy, ARCHITECTURES, usages, [launch] * len(usages))),
            *(
                each(f"{cost[name]:.0f}" for cost in costs)
                for name in (INSTRUCTIONS, "HMMA")
                for costs in ([code.total for code in codes], [code.main_loop(products) for code in codes])
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def first_launches(recorder: Recorder) -> dict[str, tuple[Launch, Work | None]]:
    """One launch of every kernel, in the first of its operator's cases that has one, in each type."""
    found: dict[str, tuple[Launch, Work | None]] = {}
    for op in OPS.values():
        check = load_gpu_check(op)
        cases = [timed.case for timed in check.timed] + [*check.checked]
        for case in (replace(case, dtype=dtype) for case in cases for dtype in op.element_types):
            work = check.work(case)
            for launch in recorder.launches(op, case):
                found.setdefault(launch.entry, (launch, work.get(launch.name)))
    return found


def occupancy(architecture: int, usage: Usage, launch: Launch | None) -> str:
    if launch is None:
        return "–"
    blocks = MULTIPROCESSOR[architecture].resident_blocks(usage, launch.threads, launch.shared_bytes)
    return f"{blocks} ({blocks * launch.warps // launch.blocks})"


def each(values: Iterable[object]) -> str:
    """The values of all architectures, or the one that they share."""
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def measurements(results: Path | None) -> tuple[str, dict[tuple[str, str], float]]:
    """The GPU, and µs by operator and case, of the timing stage. Raises SetupError if it has left no result."""
    if results is None:
        return "", {}
    path = results / "timing.json"
    try:
        stage = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read ({error}); expected what scripts/gpu -o {results} writes") from error
    found = {
        (timing["op"], timing["case"]): timing["readings"][KERNEL]["us"]
        for timing in stage["details"].get("timings", [])
        if timing.get("readings", {}).get(KERNEL, {}).get("us")
    }
    return stage["hardware"], found


def page(results: Path | None) -> str:
    """Raises SetupError if a tool is missing."""
    require_torch()
    hardware, measured = measurements(results)
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_kernels(list(OPS.values()), ARCHITECTURES, Path(folder))
        recorder = Recorder(Path(folder))
        cuda = re.search(r"release ([\d.]+)", call([find_nvcc() or "", "--version"]))
        return TEMPLATE.format(
            cuda=cuda[1] if cuda else "unknown",
            measured=f"measured on one {hardware}" if hardware else "no GPU has measured them yet",
            predictions="\n".join(predictions(recorder, compiled, measured)),
            layers="\n".join(layers(recorder, compiled)),
            resources="\n".join(resources(recorder, compiled)),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", "--results", type=Path, metavar="FOLDER", help="results of scripts/gpu, from a GPU")
    parser.add_argument("-o", "--output", type=Path, default=PAGE, metavar="FILE", help="default: docs/gpu_budget.md")
    options = parser.parse_args()
    try:
        text = page(options.results)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
