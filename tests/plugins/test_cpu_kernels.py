"""The CPU kernels by themselves, under AddressSanitizer and UBSan, with every instruction set of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kept import kept_program

import effexport.plugins
from effexport.plugins.building.toolchain import find_compiler

PLUGINS = Path(effexport.plugins.__file__).parent
NATIVE = Path(__file__).parent / "native"
OPERATORS = sorted(op.torch_name for op in effexport.plugins.OPS.values())
DRIVERS = [NATIVE / "kernel_driver.cc", *(NATIVE / "drivers" / f"{name}.cc" for name in ["element_types", *OPERATORS])]
KERNELS = [PLUGINS / name / "kernel_cpu.cc" for name in OPERATORS]


def test_every_driver_belongs_to_an_operator() -> None:
    assert set((NATIVE / "drivers").glob("*.cc")) == set(DRIVERS[1:])


@pytest.mark.slow
@pytest.mark.requires("native")
def test_the_kernels_are_right_and_clean_under_the_sanitizers() -> None:
    # -O2 takes three times as long to compile; the library itself is compiled with -O3 and tested in ONNX Runtime
    flags = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{PLUGINS}"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = kept_program("native/kernel_driver", find_compiler(), *flags, *sanitizers, *DRIVERS, *KERNELS)
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 failures"
    machine, *available = lines[0].split()
    assert (machine, available[-1]) == ("instructions:", "baseline")
    for name in OPERATORS:
        if name == "lsh_sort":  # has no vector instructions to choose
            continue
        assert [line.split(": ")[1] for line in lines if line.startswith(f"{name}: ")] == available
