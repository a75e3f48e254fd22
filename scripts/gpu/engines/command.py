"""`scripts/gpu --engines`: builds, runs, compares, times and soaks TensorRT engines on this machine's GPU.

For each target, variant and precision: build an artifact with an engine, run the engine in a fresh process that
registers none of our plugins, compare it with its reference, time it next to PyTorch, run it in Polygraphy too, if that
is installed, and run it on changing shapes while watching the GPU's memory. An engine with plugins is compared with one
that has function bodies instead. Causal models that can decode token by token do so, and are compared with the CPU.
If a step fails, its error is recorded and the other steps go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu.carrying import install_wheels
from gpu.device import Device, SetupError
from gpu.engines.fresh import Soak, compare_second_runner, run_in_fresh_process, soak_in_fresh_process
from gpu.engines.fresh_process import why_no_second_runner
from gpu.engines.latency import (
    build_with_bodies,
    compare_with_bodies,
    time_artifact,
    time_long_sequences,
    why_not_compared,
)
from gpu.engines.model import Model, build_artifact, build_separately, check_decoding, check_parity, why_left_out
from gpu.engines.page import markdown_from_results
from gpu.engines.records import Outcome, Results, json_from_results

if TYPE_CHECKING:
    from effexport.base.spec import BuildSpec

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
Polygraphy, the second runner, is optional: pip download --no-deps -d wheels polygraphy, or pip install polygraphy.
Nine variants in two precisions take long; --variants softmax,lsh --precisions fp16 runs a part of them, and --minutes
limits the time.
"""
PACKAGES = (*TENSORRT_PACKAGES, "polygraphy", "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy")


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
    parser.add_argument("--soak-runs", type=int, default=10_000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="stop soaks and begin no step after this time"
    )
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
            call = Call(not options.no_timing, options.soak_runs, time.monotonic() + 60 * options.minutes)
            run_targets(results, specs_from_options(options), Path(folder), call)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown_from_results(results))
    if results.exit_status == 2:
        reasons = "; ".join(f"{step.target}: {step.text}" for step in results.steps)
        print(f"error: neither TensorRT nor TensorRT-RTX can be used here: {reasons}", file=sys.stderr)
    return results.exit_status


def run_targets(results: Results, specs: Sequence[BuildSpec], folder: Path, call: Call) -> None:
    for target in TARGETS:
        reason = why_left_out(target)
        if reason:
            results.leave_out(target, "", "target", reason)
            continue
        for number, spec in enumerate(specs):
            model = Model(target, spec, folder / f"{target}-{number}")
            check_model(results, model, call)
            shutil.rmtree(model.folder, ignore_errors=True)


Work = Callable[[Model], Outcome]


def check_model(results: Results, model: Model, call: Call) -> None:
    """Build a model and run its steps; a step that is left out says why."""

    def step(name: str, work: Work, reason: str = "") -> bool:
        reason = reason or ("no time was left" if call.seconds_left <= 0 else "")
        if reason:
            results.leave_out(model.target, model.name, name, reason)
            return False
        return results.run(model.target, model.name, name, lambda: work(model))

    built = step("build", build_artifact) or step("build without parity of the engine", build_separately)
    missing = "" if built else "the engine was not built"
    untimed = "" if call.timed else "--no-timing was given"
    if model.spec.attention.causal:
        step("parity", check_parity, missing)
        step("decoding", check_decoding, missing)
        return
    step("fresh process", run_in_fresh_process, missing)
    step("parity", check_parity, missing)
    step("second runner", lambda m: compare_second_runner(m, m.engine), missing or why_no_second_runner(model))
    step("latency", time_artifact, missing or untimed)
    step("latency of long sequences", time_long_sequences, missing or untimed)
    step("soak", lambda m: soak_in_fresh_process(m, m.engine, call.soak()), missing)
    step("soak with graphs", lambda m: soak_in_fresh_process(m, m.engine, call.soak(graphs=True)), missing)

    unfit = missing or why_not_compared(model)
    if unfit:
        step("engine with bodies", build_with_bodies, unfit)
        return
    missing = "" if step("engine with bodies", build_with_bodies) else "the engine with bodies was not built"
    step("parity with bodies", lambda m: check_parity(m, m.body_engine), missing)
    step("plugins beside bodies", lambda m: compare_with_bodies(m, call.timed), missing)
    reason = missing or why_no_second_runner(model)
    step("second runner with bodies", lambda m: compare_second_runner(m, m.body_engine), reason)
    step("soak with bodies", lambda m: soak_in_fresh_process(m, m.body_engine, call.soak()), missing)


@dataclass(frozen=True)
class Call:
    """Settings for the steps of a call. deadline: no further step begins after it, by time.monotonic()."""

    timed: bool = True
    soak_runs: int = 10_000
    deadline: float = math.inf

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def soak(self, graphs: bool = False) -> Soak:
        return Soak(self.soak_runs, self.seconds_left, graphs)


def specs_from_options(options: argparse.Namespace) -> list[BuildSpec]:
    """The specs to build: all variants, and causal forms of those that decode. Raises SetupError for an unknown one."""
    from effexport.base.spec import build_spec_from_options
    from effexport.models.validation import SpecError
    from effexport.models.variants import ATTENTION_SPECS

    variants = options.variants.split(",") if options.variants else list(ATTENTION_SPECS)
    pairs = list(itertools.product(variants, options.precisions.split(",")))
    try:
        whole = [build_spec_from_options({"variant": v, "precision": p, **SIZE}, None) for v, p in pairs]
        decoding = [
            build_spec_from_options({"variant": v, "precision": p, "causal": True, **SIZE}, None)
            for v, p in pairs
            if ATTENTION_SPECS[v].causal_state_is_constant and not ATTENTION_SPECS[v].why_always_causal
        ]
        return whole + decoding
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
