"""The CUDA kernels: compiled for every GPU they are meant for, and run on the CPU by native/cuda_on_cpu.h.

The head of that file explains what an emulated run shows, and what only a GPU can (scripts/gpu). The
test_cuda_*.py beside this one compare results, operator by operator.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from cuda_kernels import ENTRIES, PLUGINS, REGISTERS, SANITIZERS, THREADS, build, run
from gpu.compiled import Usage, parse_usage
from kept import kept, native_sources

from effexport.plugins.building.toolchain import CUDA_ARCHITECTURES, find_nvcc, machine_code_options
from effexport.plugins.ops import OPS

KERNELS = tuple(sorted(op.torch_name for op in OPS.values()))
# The GPU of the measurements. For the oldest and the newest, test_ptx_of_kernels.py assembles the same code from PTX.
SOME = (90,)
for_some_and_every_architecture = pytest.mark.parametrize(
    "architectures",
    [pytest.param(SOME, id="some"), pytest.param(CUDA_ARCHITECTURES, id="every", marks=pytest.mark.soak)],
)


@functools.cache
def compiled(kernel: str, architectures: tuple[int, ...]) -> dict[tuple[str, int], Usage]:
    """What ptxas says of each entry, on those architectures that this nvcc knows. The code is the library's, and
    warnings are errors."""
    nvcc = find_nvcc()
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    code = machine_code_options(known(architectures))
    command = [nvcc, "-std=c++17", "-I", PLUGINS, *strict, *code, "--resource-usage", "-c"]

    def compile_to(folder: Path) -> None:
        messages = run(*command, PLUGINS / kernel / "kernel_cuda.cu", "-o", folder / "kernel.o")
        (folder / "messages").write_text(messages, encoding="utf-8")

    decided_by = [run(nvcc, "--version"), *map(str, command), *native_sources()]
    folder = kept(f"cuda/{kernel}-{len(code)}", decided_by, compile_to)
    return parse_usage((folder / "messages").read_text(encoding="utf-8"))


@functools.cache
def known(architectures: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a list that this nvcc knows, which are all in CUDA 13."""
    codes = run(find_nvcc(), "--list-gpu-code").split()
    found = tuple(sm for sm in architectures if f"sm_{sm}" in codes)
    release = re.search(r"release (\d+)\.", run(find_nvcc(), "--version"))
    assert found == architectures if int(release[1]) == 13 else found
    return found


def entries_of(kernel: str) -> set[str]:
    prefix = f"effexport_{kernel.removesuffix('_attention') if kernel.startswith('aft') else kernel}"
    return {entry for entry in ENTRIES if entry.startswith(prefix)}


# These take longest to compile. Their results are compared in every run.
SANITIZED_IN_SOAK = ("aft_window_attention", "iterative_pinv", "linear_attention")


def test_every_entry_belongs_to_one_kernel() -> None:
    assert sorted(ENTRIES) == sorted(entry for kernel in KERNELS for entry in entries_of(kernel))


@pytest.mark.requires("nvcc")
@for_some_and_every_architecture
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_without_warnings_for_every_gpu(kernel: str, architectures: tuple[int, ...]) -> None:
    found = {(entry, architecture) for entry in entries_of(kernel) for architecture in known(architectures)}
    assert set(compiled(kernel, architectures)) == found


@pytest.mark.requires("nvcc")
@for_some_and_every_architecture
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_can_be_launched_with_its_threads(kernel: str, architectures: tuple[int, ...]) -> None:
    for (entry, architecture), usage in compiled(kernel, architectures).items():
        assert usage.registers * THREADS[entry] <= REGISTERS, (entry, architecture, usage)
        # shared memory is all dynamic, and the launches stay within 48 KiB of it
        assert usage.shared_bytes == 0, (entry, architecture, usage)
        # otherwise a tile would not fit in registers
        assert usage.spilled_bytes == 0, (entry, architecture, usage)


@pytest.mark.slow
@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(kernel, marks=pytest.mark.soak if kernel in SANITIZED_IN_SOAK else ()) for kernel in KERNELS],
)
def test_no_kernel_leaves_its_arrays_or_its_shared_memory(kernel: str) -> None:
    run(build(f"sanitized/{kernel}", *SANITIZERS))
