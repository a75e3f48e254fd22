#!/usr/bin/env python3
"""Check, time and profile the CUDA kernels of all operators on this machine's NVIDIA GPU.

Needs an NVIDIA GPU, nvcc, a C++ compiler and PyTorch with CUDA; ncu and compute-sanitizer for two of the stages.
Every stage writes one JSON file into the folder of results before the next one begins. A run into the same folder
repeats what is missing or did not pass.

    python3 scripts/gpu --plan              # what would run, for how long, and how much has to be copied to the GPU
    python3 scripts/gpu --rehearse          # the same stages without a GPU: kernels run in an emulation on the CPU
    python3 scripts/gpu -o results

Exit status: 0 all stages passed, 1 a stage failed or did not run, 2 the GPU, a tool or an option is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import gpu  # noqa: E402, F401, makes effexport importable

# isort: split
from effexport.plugins.ops import OPS  # noqa: E402
from gpu import ROOT  # noqa: E402
from gpu.device import Device, SetupError  # noqa: E402
from gpu.plan import STAGES, print_plan, sources_hash  # noqa: E402
from gpu.stages import PASSED, Result, Run, Stage, run_stages  # noqa: E402


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="folder for one JSON file per stage")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    mode.add_argument("--rehearse", action="store_true", help="run all stages in an emulation on the CPU")
    stages, ops = [stage.name for stage in STAGES], [op.torch_name for op in OPS.values()]
    parser.add_argument("--stages", type=names_among(stages), default=stages, metavar="NAME,…", help="default: all")
    parser.add_argument("--ops", type=names_among(ops), default=ops, metavar="NAME,…", help="default: all operators")
    options = parser.parse_args(arguments)
    if not (options.plan or options.rehearse or options.output):
        parser.error("no folder for the results is given; add -o FOLDER, --rehearse or --plan")
    return options


class names_among:  # noqa: N801, argparse shows the name of a type in errors
    """Parses names with commas between them."""

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in self.known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(self.known)}")
        return [name for name in self.known if name in names]


def run_all(run: Run, stages: Sequence[Stage]) -> bool:
    """Run the stages, print their summaries, then their tables, and return whether all of them passed."""
    outcomes: list[tuple[Stage, Result, float]] = []
    for stage, result, seconds in run_stages(run, stages):
        outcomes.append((stage, result, seconds))
        print(f"{stage.name}: {result.status} in {seconds:.0f} s", flush=True)
    print()
    for stage, result, seconds in outcomes:
        print(f"{stage.name:12} {result.status:8} {seconds:4.0f} of {stage.limit(run.device):3} s  {result.summary}")
    for _, result, _ in outcomes:
        if result.table:
            print(f"\n{result.table}")
    return all(result.status == PASSED for _, result, _ in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    stages = [stage for stage in STAGES if stage.name in options.stages]
    if options.plan:
        print_plan(stages)
        return 0
    device = Device(emulated=options.rehearse)
    sources = sources_hash()
    with tempfile.TemporaryDirectory() as folder:
        results = options.output or Path(folder)
        results.mkdir(parents=True, exist_ok=True)
        work = ROOT / "build" / "gpu" / f"{device.name}-{sources[:12]}"
        try:
            device.check_setup()
            passed = run_all(Run(device, results, work, tuple(options.ops), sources), stages)
        except SetupError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
