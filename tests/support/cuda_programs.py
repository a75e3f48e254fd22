"""Emulated kernels with a sanitizer in them, and the program of scripts/gpu that calls them as contracts say."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpu import building
from gpu.device import Device, find_compiler
from gpu.stages import Run
from kept import kept, native_sources

from effexport.plugins.ops import CUDA_OPS

ALL_OPS = tuple(op.torch_name for op in CUDA_OPS.values())


def sanitized_programs(name: str, options: Sequence[str], ops: Sequence[str] = ALL_OPS) -> Path:
    """The folder of `driver` and `kernels.so`, compiled when first needed with these options."""
    version = subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    used = [building.NATIVE / "driver.cc", building.NATIVE / "on_cpu.cc", Path(building.__file__)]
    decided_by = [version, *options, *ops, *used, *native_sources()]
    return kept(name, decided_by, lambda folder: compile_to(folder, options, ops))


def compile_to(folder: Path, options: Sequence[str], ops: Sequence[str]) -> None:
    run = Run(Device(emulated=True), folder, folder, tuple(ops), "")
    building.make_library(run, building.emulating_toolchain(*options), folder / "kernels.so", ops)
    building.make_driver(run, folder / "driver", *(option for option in options if not option.startswith("-D")))
