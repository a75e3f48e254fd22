"""The CUDA kernels of SegmentMeans and SequenceConv: run on the CPU by cuda_on_cpu.h, and compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda_kernels import PLUGINS, SANITIZERS, assert_products_are_exact, build, run

from effexport.plugins.building.toolchain import find_nvcc

OPS = ("segment_means", "sequence_conv")
POINTER, INTEGER = "u64", "u32"
# inputs, int32 scalars, outputs
PARAMETERS = {
    "segment_means": [POINTER] * 2 + [INTEGER] * 5 + [POINTER],
    "sequence_conv": [POINTER] * 4 + [INTEGER] * 5 + [POINTER],
}


@pytest.mark.slow
@pytest.mark.requires("native")
def test_emulated_kernels_give_the_results_of_the_cpu_kernels_within_their_arrays() -> None:
    cpu_kernels = [PLUGINS / op / "kernel_cpu.cc" for op in OPS]
    assert "0 failures" in run(build("emulated_attention", *SANITIZERS, sources=cpu_kernels)).splitlines()


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
@pytest.mark.parametrize("op", OPS)
def test_the_kernels_compile_without_warnings_to_entries_of_every_type(op: str, tmp_path: Path) -> None:
    ptx = tmp_path / "kernel.ptx"
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    source = PLUGINS / op / "kernel_cuda.cu"
    run(find_nvcc(), "-std=c++17", *strict, "-ptx", "-arch=compute_80", "-I", PLUGINS, source, "-o", ptx)
    text = ptx.read_text(encoding="utf-8")
    found = {
        entry: re.findall(r"\.param \.(\w+) ", parameters)
        for entry, parameters in re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", text)
    }
    assert found == {f"effexport_{op}_{dtype}": PARAMETERS[op] for dtype in ("float32", "float16", "bfloat16")}
    assert_products_are_exact(text)
