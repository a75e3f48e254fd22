"""The CUDA kernels: compiled for every GPU they are meant for, and run on the CPU by native/cuda_on_cpu.h.

The head of that file explains what an emulated run shows, and what only a GPU can (scripts/gpu). The
test_cuda_*.py beside this one compare results, operator by operator.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda_kernels import ENTRIES, PLUGINS, SANITIZERS, THREADS, assert_products_are_exact, build, run
from gpu.compiled import Usage, parse_usage

from effexport.plugins.building.toolchain import CUDA_ARCHITECTURES, find_nvcc
from effexport.plugins.ops import OPS

KERNELS = tuple(sorted(op.torch_name for op in OPS.values()))
REGISTERS = 65536


# The oldest, those of data centres and the newest; `effexport plugins build` compiles for all of them anyway.
SOME = (75, 80, 90, 120)
# Products of these kernels take tensor cores in every half type.
MULTIPLYING = {
    "linear_attention": ("linear_attention_states", "linear_attention_outputs", "linear_attention_causal_outputs"),
    "lsh_attention": ("lsh_attention",),
    "masked_attention": ("masked_attention",),
    "sequence_conv": ("sequence_conv",),
}


@pytest.fixture(
    scope="module",
    params=[SOME, pytest.param(CUDA_ARCHITECTURES, marks=pytest.mark.soak)],
    ids=["some", "every"],
)
def architectures(request: pytest.FixtureRequest) -> set[int]:
    """Those of a list that this nvcc knows."""
    known = run(find_nvcc(), "--list-gpu-code").split()
    return {sm for sm in request.param if f"sm_{sm}" in known}


@pytest.fixture(scope="module")
def usages(architectures: set[int], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Usage]:
    """Compiles all kernels for these architectures, with warnings as errors."""
    folder = tmp_path_factory.mktemp("cuda")
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    codes = [option for sm in sorted(architectures) for option in ("-gencode", f"arch=compute_{sm},code=sm_{sm}")]
    command = [find_nvcc(), "-std=c++17", "-I", PLUGINS, "--threads", "2", *strict, *codes, "--resource-usage", "-c"]
    return {
        key: usage
        for kernel in KERNELS
        for key, usage in parse_usage(
            run(*command, PLUGINS / kernel / "kernel_cuda.cu", "-o", folder / f"{kernel}.o")
        ).items()
    }


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
def test_the_kernels_compile_without_warnings_for_every_gpu(
    usages: dict[tuple[str, int], Usage], architectures: set[int]
) -> None:
    release = re.search(r"release (\d+)\.", run(find_nvcc(), "--version"))
    if int(release[1]) == 13:
        assert architectures in (set(SOME), set(CUDA_ARCHITECTURES))
    assert architectures
    assert set(usages) == {(entry, architecture) for entry in ENTRIES for architecture in architectures}


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
def test_the_kernels_can_be_launched_with_their_threads(usages: dict[tuple[str, int], Usage]) -> None:
    for (entry, architecture), usage in usages.items():
        assert usage.registers * THREADS[entry] <= REGISTERS, (entry, architecture, usage)
        # shared memory is all dynamic, and the launches stay within 48 KiB of it
        assert usage.shared_bytes == 0, (entry, architecture, usage)
        # otherwise a tile would not fit in registers
        assert usage.spilled_bytes == 0, (entry, architecture, usage)


@pytest.mark.slow
@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
@pytest.mark.parametrize("kernel", MULTIPLYING)
@pytest.mark.parametrize("architecture", SOME)
def test_half_types_are_multiplied_on_tensor_cores(architecture: int, kernel: str, tmp_path: Path) -> None:
    source = PLUGINS / kernel / "kernel_cuda.cu"
    command = [find_nvcc(), "-std=c++17", "-ptx", f"-arch=compute_{architecture}", "-I", PLUGINS, source]
    run(*command, "-o", tmp_path / "kernel.ptx")
    parts = re.split(r"\.visible \.entry effexport_(\w+)\(", (tmp_path / "kernel.ptx").read_text(encoding="utf-8"))
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    # SM 75 has no products of bfloat16
    types = ("float16",) if architecture < 80 else ("float16", "bfloat16")
    for entry in MULTIPLYING[kernel]:
        for dtype in types:
            assert "mma.sync" in bodies[f"{entry}_{dtype}"], entry
        assert "mma.sync" not in bodies[f"{entry}_float32"], entry


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
@pytest.mark.parametrize("kernel", KERNELS)
def test_ptx_has_the_entries_and_parameters_that_tensorrt_is_told(kernel: str, tmp_path: Path) -> None:
    ptx = tmp_path / "kernel.ptx"
    source = PLUGINS / kernel / "kernel_cuda.cu"
    run(find_nvcc(), "-std=c++17", "-ptx", "-arch=compute_80", "-I", PLUGINS, source, "-o", ptx)
    text = ptx.read_text(encoding="utf-8")
    found = {
        entry: re.findall(r"\.param \.(\w+) ", parameters)
        for entry, parameters in re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", text)
    }
    prefix = f"effexport_{kernel.removesuffix('_attention') if kernel.startswith('aft') else kernel}"
    assert found == {entry: types for entry, types in ENTRIES.items() if entry.startswith(prefix)}
    assert_products_are_exact(text)
    # SM 90 alone has wgmma, and TensorRT does not support cooperative or cluster launches
    assert not re.search(r"\b(wgmma|cluster|grid)\b", text)


@pytest.mark.slow
@pytest.mark.requires("native")
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_leaves_its_arrays_or_its_shared_memory(kernel: str) -> None:
    run(build(f"sanitized/{kernel}", *SANITIZERS))
