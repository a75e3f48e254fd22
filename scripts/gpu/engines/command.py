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
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu.device import SetupError
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
PACKAGES = (*TENSORRT_PACKAGES, "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "effexport")


def main(options: argparse.Namespace) -> int:
    """Run all checks and return the exit status. options: those of gpu_checks.py."""
    try:
        require_gpu()
        with tempfile.TemporaryDirectory() as folder:
            if options.wheels:
                install_wheels(options.wheels, Path(folder))
            require_effexport()
            results = Results(describe_machine(), lambda found: save(found, options))
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


def require_effexport() -> None:
    missing = [name for name in ("effexport", "onnx", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise SetupError(
            f"{', '.join(missing)} cannot be imported; expected effexport and what it needs. Run "
            "`pip install '.[cpu]'` in the repository, or, without a network and with the rest in place, "
            "`pip install --no-deps --no-build-isolation .`"
        )


def describe_machine() -> dict[str, str]:
    """What the results were measured on."""
    import torch

    driver, clock = nvidia_smi("driver_version", "clocks.max.sm")
    major, minor = torch.cuda.get_device_capability(0)
    free, total = torch.cuda.mem_get_info(0)
    described = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "GPU": torch.cuda.get_device_name(0),
        "compute capability": f"SM {major}{minor}",
        "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free at the start",
        "highest SM clock": f"{clock} MHz",
        "driver": driver,
        "CUDA of PyTorch": str(torch.version.cuda),
        "Python": platform.python_version(),
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described[name] = importlib.metadata.version(name)
    return described


def require_gpu() -> None:
    """Check that PyTorch can use a GPU. Raises SetupError otherwise."""
    try:
        import torch
    except ImportError as error:
        raise SetupError(
            f"PyTorch cannot be imported ({error}); expected PyTorch with CUDA. Install a CUDA build of torch"
        ) from error
    if torch.version.cuda is None:
        raise SetupError(
            f"PyTorch {torch.__version__} is a CPU build; expected one with CUDA, on a machine with an NVIDIA GPU. "
            "Install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        raise SetupError(
            f"PyTorch {torch.__version__} finds no NVIDIA GPU; expected one with its driver. "
            "Run `nvidia-smi` to see what the driver sees"
        )


def nvidia_smi(*fields: str) -> list[str]:
    """Properties of the first GPU. Raises SetupError if the driver's tool fails."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"nvidia-smi failed: {error}; expected the tool that comes with the driver. Put it on PATH"
        ) from error
    return [value.strip() for value in output.split(",")]


def save(results: Results, options: argparse.Namespace) -> None:
    if options.output_json:
        options.output_json.write_text(json_from_results(results), encoding="utf-8")
    if options.output_markdown:
        options.output_markdown.write_text(markdown_from_results(results), encoding="utf-8")
