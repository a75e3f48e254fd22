"""The CPU kernels by themselves, under AddressSanitizer and UBSan, with every instruction set of this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import effexport.plugins

PLUGINS = Path(effexport.plugins.__file__).parent
NATIVE = Path(__file__).parent / "native"
OPERATORS = sorted(op.torch_name for op in effexport.plugins.OPS.values())
DRIVERS = [NATIVE / "kernel_driver.cc", *(NATIVE / "drivers" / f"{name}.cc" for name in ["element_types", *OPERATORS])]
KERNELS = [PLUGINS / name / "kernel_cpu.cc" for name in OPERATORS]


def test_every_driver_belongs_to_an_operator() -> None:
    assert set((NATIVE / "drivers").glob("*.cc")) == set(DRIVERS[1:])


@pytest.mark.requires("native")
def test_the_kernels_are_right_and_clean_under_the_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the library was built, so there is a compiler"
    program = tmp_path / "kernel_driver"
    flags = ["-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-I", str(PLUGINS)]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler, *flags, *sanitizers, *map(str, [*DRIVERS, *KERNELS]), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 failures"
    avx2 = platform.machine() == "x86_64" and "avx2" in Path("/proc/cpuinfo").read_text()
    for name in OPERATORS:
        if name == "lsh_sort":  # has no vector instructions to choose
            continue
        assert f"{name}: baseline" in lines
        assert not avx2 or f"{name}: avx2" in lines
