#!/usr/bin/env python3
"""Check, time and profile the CUDA kernels of all operators on this machine's NVIDIA GPU.

Needs an NVIDIA GPU, nvcc, a C++ compiler and PyTorch with CUDA; ncu and compute-sanitizer for two of the stages.
Every stage writes one JSON file into the folder of results before the next one begins. A run into the same folder
repeats what is missing or did not pass.

    python3 scripts/gpu --plan              # what would run, for how long, and how much has to be copied to the GPU
    python3 scripts/gpu --rehearse          # the same stages without a GPU: kernels run in an emulation on the CPU
    python3 scripts/gpu -o results

A second call runs real artifacts in ONNX Runtime on the GPU: parity, CUDA graphs, bound inputs, and latencies beside
PyTorch. What it needs on a machine without a network is prepared where there is one, in parts that can be copied:

    python3 scripts/gpu --carry 3.12        # for the Python of that machine; copy build/gpu/carried/1, 2, …
    python3 scripts/gpu --artifacts -o results      # also with --plan or --rehearse

TensorRT engines are checked by a command of their own: scripts/gpu --engines --help.

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
from effexport.plugins.ops import CUDA_OPS  # noqa: E402
from gpu import ROOT  # noqa: E402
from gpu.carrying import carry  # noqa: E402
from gpu.device import Device, SetupError  # noqa: E402
from gpu.plan import ARTIFACT_STAGES, STAGES, print_plan, remove_outdated, sources_hash  # noqa: E402
from gpu.stages import PASSED, Result, Run, Stage, interruptible, run_stages  # noqa: E402


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="folder for one JSON file per stage")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    mode.add_argument("--rehearse", action="store_true", help="run all stages in an emulation on the CPU")
    mode.add_argument("--carry", metavar="PYTHON", help="prepare the second call for a machine with this Python")
    parser.add_argument("--artifacts", action="store_true", help="the second call: real artifacts in ONNX Runtime")
    table = ARTIFACT_STAGES if "--artifacts" in arguments else STAGES
    stages, ops = [stage.name for stage in table], [op.torch_name for op in CUDA_OPS.values()]
    parser.add_argument("--stages", type=names_among(stages), default=stages, metavar="NAME,…", help="default: all")
    parser.add_argument("--ops", type=names_among(ops), metavar="NAME,…", help="default: all operators")
    options = parser.parse_args(arguments)
    if not (options.plan or options.rehearse or options.carry or options.output):
        parser.error("no folder for the results is given; add -o FOLDER, --rehearse or --plan")
    if options.artifacts and options.ops:
        parser.error("--ops has no effect on artifacts, which have all operators; leave it out with --artifacts")
    options.ops = options.ops or ops
    options.stages = [stage for stage in table if stage.name in options.stages]
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
    """Run the stages, print their summaries, then their tables, and return whether all of them passed.

    SIGINT and SIGTERM end it early, with the results until then.
    """
    outcomes: list[tuple[Stage, Result, float]] = []
    with interruptible():
        for stage, result, seconds in run_stages(run, stages):
            outcomes.append((stage, result, seconds))
            print(f"{stage.name}: {result.status} in {seconds:.0f} s", flush=True)
    print()
    for stage, result, seconds in outcomes:
        print(f"{stage.name:12} {result.status:8} {seconds:4.0f} of {stage.limit(run.device):3} s  {result.summary}")
    for _, result, _ in outcomes:
        if result.table:
            print(f"\n{result.table}")
    return len(outcomes) == len(stages) and all(result.status == PASSED for _, result, _ in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--engines" in arguments:
        from gpu.engines.command import main as check_engines

        return check_engines([argument for argument in arguments if argument != "--engines"])
    options = parse_options(arguments)
    try:
        if options.carry:
            carry(options.carry)
            return 0
        if options.plan:
            print_plan(options.stages)
            return 0
        return 0 if run_on_device(options) else 1
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_on_device(options: argparse.Namespace) -> bool:
    """Run the stages on the GPU or in the emulation, and return whether all passed.

    Raises SetupError without a GPU, or if the folder for the results cannot be made.
    """
    device = Device(emulated=options.rehearse)
    device.check_setup(", or add --rehearse to run everything in an emulation")
    sources = sources_hash()
    kind = f"{device.name}-{'artifacts' if options.artifacts else 'kernels'}"
    work = ROOT / "build" / "gpu" / f"{kind}-{sources[:12]}"
    with tempfile.TemporaryDirectory() as folder:
        results = options.output or Path(folder)
        try:
            results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"-o {results}: expected a folder that can be written ({error.strerror})") from error
        remove_outdated(work, kind)
        run = Run(device, results, work, tuple(options.ops), sources, hardware=device.hardware())
        return run_all(run, options.stages)


if __name__ == "__main__":
    sys.exit(main())
