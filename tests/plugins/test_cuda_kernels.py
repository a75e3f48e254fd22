"""The CUDA kernels: compiled for every GPU they are meant for, and run on the CPU by native/cuda_on_cpu.h.

The head of that file explains what an emulated run shows, and what only a GPU can (scripts/gpu). The
test_cuda_*.py beside this one compare results, operator by operator.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from cuda_kernels import PLUGINS, SANITIZERS, plugin_entries, run
from cuda_programs import sanitized_programs
from gpu.calls import write_calls
from gpu.compiled import Usage, parse_usage
from kept import kept, native_sources

from effexport.plugins.building.toolchain import CUDA_ARCHITECTURES, find_nvcc, machine_code_options
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import OPS

BY_NAME = {op.torch_name: op for op in OPS.values()}
KERNELS = tuple(sorted(BY_NAME))
# The GPU of the measurements. For the oldest and the newest, test_ptx_of_kernels.py assembles the same code from PTX.
SOME = (90,)
for_some_and_every_architecture = pytest.mark.parametrize(
    "architectures",
    [pytest.param(SOME, id="some"), pytest.param(CUDA_ARCHITECTURES, id="every", marks=pytest.mark.soak)],
)


@functools.cache
def compiled(kernel: str, architectures: tuple[int, ...]) -> dict[tuple[str, int], Usage]:
    """The resources of each entry by ptxas, on those architectures that this nvcc knows. The code is the library's, and
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


# These take longest to compile. Their results are compared in every run.
SANITIZED_IN_SOAK = ("aft_window_attention", "iterative_pinv", "linear_attention")


@pytest.mark.requires("nvcc")
@for_some_and_every_architecture
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_without_warnings_for_every_gpu(kernel: str, architectures: tuple[int, ...]) -> None:
    found = {sm: {entry for entry, own in compiled(kernel, architectures) if own == sm} for sm in known(architectures)}
    assert {*plugin_entries(BY_NAME[kernel])} <= found[architectures[0]]
    assert set(map(frozenset, found.values())) == {frozenset(found[architectures[0]])}


@pytest.mark.requires("nvcc")
@for_some_and_every_architecture
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_spills_no_registers_and_fixes_no_shared_memory(kernel: str, architectures: tuple[int, ...]) -> None:
    for (entry, architecture), usage in compiled(kernel, architectures).items():
        # shared memory is all dynamic, and the launches stay within 48 KiB of it
        assert usage.shared_bytes == 0, (entry, architecture, usage)
        # otherwise a tile would not fit in registers
        assert usage.spilled_bytes == 0, (entry, architecture, usage)


@pytest.mark.slow
@pytest.mark.requires("native", "torch")
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(kernel, marks=pytest.mark.soak if kernel in SANITIZED_IN_SOAK else ()) for kernel in KERNELS],
)
def test_no_kernel_leaves_its_arrays_or_its_shared_memory(kernel: str, tmp_path: Path) -> None:
    """Also where arrays begin at any element."""
    folder, contract = sanitized_programs(f"sanitized/{kernel}", SANITIZERS, (kernel,)), load_contract(BY_NAME[kernel])
    calls = [(kernel, contract, case) for case in contract.small + contract.cases]
    for offset, chosen in ((0, calls), (1, calls[: len(contract.small)])):
        write_calls(tmp_path / "calls", chosen, offset=offset)
        assert f"{len(chosen)} calls" in run(folder / "driver", folder / "kernels.so", tmp_path / "calls")
