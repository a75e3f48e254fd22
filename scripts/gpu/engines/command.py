"""`scripts/gpu --engines`: builds, runs, compares, times and soaks TensorRT engines on this machine's GPU.

For each target, variant and precision: build an artifact with an engine, run the engine in a fresh process that
registers none of our plugins, compare it with its reference, time it next to PyTorch, and run it on changing shapes
while watching the GPU's memory. If a step fails, its error is recorded and the other steps go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu.device import Device, SetupError
from gpu.engines.fresh import run_in_fresh_process, soak_in_fresh_process
from gpu.engines.latency import time_artifact, time_long_sequences
from gpu.engines.model import Model, build_artifact, build_separately, check_parity, why_left_out
from gpu.engines.page import markdown_from_results
from gpu.engines.records import Outcome, Results, json_from_results
from gpu.wheels import install_wheels

if TYPE_CHECKING:
    from effexport.spec import BuildSpec

TARGETS = ("trt", "trt-rtx")
# large enough that kernels take longer than launches, and small enough for the CPU as the reference
SIZE = {"dim": 256, "heads": 4, "layers": 2, "seq_len": 1024}
TENSORRT_PACKAGES = ("tensorrt", "tensorrt_cu13", "tensorrt_rtx", "tensorrt-rtx-cu13", "cuda-bindings")
EXAMPLES = """TensorRT on a machine without a network, whose Python is 3.12: fetch the wheels where there is one,
  version=1.7.1.116
  pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d wheels \\
    tensorrt-rtx-cu13-libs==$version tensorrt-rtx-cu13-bindings==$version
  pip wheel --no-deps -w wheels tensorrt-rtx-cu13==$version
split files that are too large to transfer at once,
  (cd wheels && for wheel in tensorrt_rtx_cu13_libs-*.whl; do split -b 48M $wheel $wheel.part && rm $wheel; done)
copy all files, in several steps if necessary, into one folder of that machine, and there
  python3 scripts/gpu --engines --wheels wheels -o results
Eight variants in two precisions take long; --variants softmax,lsh --precisions fp16 runs a part of them.
"""
PACKAGES = (*TENSORRT_PACKAGES, "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu --engines",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write engines.json and engines.md there")
    parser.add_argument("--variants", metavar="NAME,…", help="attention variants; default: all")
    parser.add_argument("--precisions", default="fp32,fp16", metavar="NAME,…", help="default: %(default)s")
    parser.add_argument("--no-timing", action="store_true", help="only compare results")
    parser.add_argument("--soak-runs", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="install the wheels in this folder first, for this run only"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and return the exit status: 1 if a step failed, 2 without a GPU or without any target."""
    options = parse_options(arguments)
    try:
        Device(emulated=False).check_setup()
        with tempfile.TemporaryDirectory() as folder:
            if options.wheels:
                install_wheels(options.wheels, Path(folder))
            require_packages()
            results = Results(describe_machine(), lambda found: save(found, options.output))
            run_targets(results, specs_from_options(options), Path(folder), options)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown_from_results(results))
    if results.exit_status == 2:
        reasons = "; ".join(f"{step.target}: {step.text}" for step in results.steps)
        print(f"error: neither TensorRT nor TensorRT-RTX can be used here: {reasons}", file=sys.stderr)
    return results.exit_status


def run_targets(results: Results, specs: Sequence[BuildSpec], folder: Path, options: argparse.Namespace) -> None:
    for target in TARGETS:
        reason = why_left_out(target)
        if reason:
            results.leave_out(target, "", "target", reason)
            continue
        for spec in specs:
            model = Model(target, spec, folder / f"{target}-{spec.variant}-{spec.precision}")
            check_model(results, model, options)
            shutil.rmtree(model.folder, ignore_errors=True)


def check_model(results: Results, model: Model, options: argparse.Namespace) -> None:
    def step(name: str, function: Callable[[Model], Outcome]) -> bool:
        return results.run(model.target, model.name, name, lambda: function(model))

    with_engine: dict[str, Callable[[Model], Outcome]] = {
        "fresh process": run_in_fresh_process,
        "parity": check_parity,
        "latency": time_artifact,
        "latency of long sequences": time_long_sequences,
        "soak": lambda m: soak_in_fresh_process(m, options.soak_runs, graphs=False),
        "soak with graphs": lambda m: soak_in_fresh_process(m, options.soak_runs, graphs=True),
    }
    built = step("build", build_artifact) or step("build without parity of the engine", build_separately)
    for name, function in with_engine.items():
        if not built:
            results.leave_out(model.target, model.name, name, "the engine was not built")
        elif options.no_timing and name.startswith("latency"):
            results.leave_out(model.target, model.name, name, "--no-timing was given")
        else:
            step(name, function)


def specs_from_options(options: argparse.Namespace) -> list[BuildSpec]:
    """The specs to build. Raises SetupError for an unknown variant or precision."""
    from effexport.models.spec import ATTENTION_SPECS
    from effexport.models.validation import SpecError
    from effexport.spec import build_spec_from_options

    variants = options.variants.split(",") if options.variants else list(ATTENTION_SPECS)
    pairs = itertools.product(variants, options.precisions.split(","))
    try:
        return [build_spec_from_options({"variant": v, "precision": p, **SIZE}, None) for v, p in pairs]
    except SpecError as error:
        raise SetupError(f"--variants or --precisions is wrong: {error}") from error


def require_packages() -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if not importlib.util.find_spec(name)]
    if missing:
        raise SetupError(
            f"{', '.join(missing)} cannot be imported; expected what effexport needs to build artifacts: "
            "pip install '.[build,cpu]' in the repository, or --wheels"
        )


def describe_machine() -> dict[str, str]:
    """What the results were measured on."""
    described = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **Device(emulated=False).description(),
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described[name] = importlib.metadata.version(name)
    return described


def save(results: Results, folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "engines.json").write_text(json_from_results(results), encoding="utf-8")
        (folder / "engines.md").write_text(markdown_from_results(results), encoding="utf-8")
