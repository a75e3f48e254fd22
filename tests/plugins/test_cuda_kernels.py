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
from gpu.budget import ARCHITECTURES as SOME
from gpu.calls import write_calls
from gpu.compiled import compile_kernels
from kernel_ptx import kept_usages

from effexport.plugins.building.toolchain import CUDA_ARCHITECTURES, assembled_from, find_nvcc
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS

BY_NAME = {op.torch_name: op for op in CUDA_OPS.values()}
KERNELS = tuple(sorted(BY_NAME))
for_some_and_every_architecture = pytest.mark.parametrize(
    "architectures",
    [pytest.param(SOME, id="some"), pytest.param(CUDA_ARCHITECTURES, id="every", marks=pytest.mark.soak)],
)


@functools.cache
def known(architectures: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a list that this nvcc knows, which are all in CUDA 13."""
    codes = run(find_nvcc(), "--list-gpu-code").split()
    found = tuple(sm for sm in architectures if f"sm_{sm}" in codes)
    release = re.search(r"release (\d+)\.", run(find_nvcc(), "--version"))
    assert found == architectures if int(release[1]) == 13 else found
    return found


# One with the tiles of the attention core, and one of several launches with scratch memory. Results of all kernels are
# compared in every run; compiling one with AddressSanitizer takes up to a minute.
SANITIZED_IN_EVERY_RUN = ("lsh_sort", "masked_attention")


@pytest.mark.requires("nvcc")
@for_some_and_every_architecture
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_without_warnings_for_every_gpu(kernel: str, architectures: tuple[int, ...]) -> None:
    usages = kept_usages([BY_NAME[kernel]], known(architectures))
    found = {sm: {entry for entry, own in usages if own == sm} for sm in known(architectures)}
    assert {*plugin_entries(BY_NAME[kernel])} <= found[architectures[0]]
    assert set(map(frozenset, found.values())) == {frozenset(found[architectures[0]])}


@pytest.mark.requires("nvcc")
@for_some_and_every_architecture
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_spills_no_registers_and_fixes_no_shared_memory(kernel: str, architectures: tuple[int, ...]) -> None:
    for (entry, architecture), usage in kept_usages([BY_NAME[kernel]], known(architectures)).items():
        # shared memory is all dynamic, and launches opt in to more than 48 KiB of it
        assert usage.shared_bytes == 0, (entry, architecture, usage)
        # otherwise a tile would not fit in registers
        assert usage.spilled_bytes == 0, (entry, architecture, usage)


# Of operators with several launches: those between others, the last ones, and kernels launched alone. Others are first.
MIDDLE = {
    *("aft_simple_merge", "aft_window_others", "banded_attention_partials", "linear_attention_combine"),
    *("linear_recurrence_states", "lsh_attention", "lsh_attention_wide"),
}
LAST = {
    *("aft_simple_gate", "aft_window_attend", "aft_window_causal", "banded_attention", "banded_attention_wide"),
    *("linear_attention_outputs", "linear_attention_causal_outputs", "linear_recurrence", "lsh_attention_combine"),
    *("lsh_sort_counted", "masked_attention_merge"),
}
ALONE = {"lsh_sort", "linear_recurrence_columns"}
WAITING = [name for name, op in BY_NAME.items() if "wait_for_prerequisites" in (PLUGINS / op.cuda_source).read_text()]


@pytest.mark.requires("nvcc")
@pytest.mark.parametrize("kernel", WAITING)
def test_launches_overlap_on_sm_90_and_wait_before_they_touch_memory(kernel: str) -> None:
    """In machine code: nvcc may move loads of some arrays."""
    assert assembled_from(90) == 90
    for (entry, architecture), usage in kept_usages([BY_NAME[kernel]], known((90, 120))).items():
        stem = re.sub(r"^effexport_|_(float32|float16|bfloat16)$", "", entry)
        waits, launches = stem in LAST | MIDDLE, stem not in LAST | ALONE
        assert usage.begins.split() == ["wait"] * waits + ["launch_dependents"] * launches, (entry, architecture)


@pytest.mark.soak
@pytest.mark.requires("nvcc", "torch")
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_record_of_usages_is_what_nvcc_says(kernel: str, tmp_path: Path) -> None:
    assert kept_usages([BY_NAME[kernel]], SOME) == compile_kernels([BY_NAME[kernel]], SOME, tmp_path)


@pytest.mark.slow
@pytest.mark.requires("native", "torch")
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(kernel, marks=[pytest.mark.soak] * (kernel not in SANITIZED_IN_EVERY_RUN)) for kernel in KERNELS],
)
@pytest.mark.parametrize(
    "dtypes",
    [
        # an array of bfloat16 lies in memory as one of float16: small cases have both
        pytest.param(("float32", "float16", "int32"), id="larger cases in two types"),
        pytest.param(("bfloat16",), id="larger cases in bfloat16", marks=pytest.mark.soak),
    ],
)
def test_no_kernel_leaves_its_arrays_or_its_shared_memory(kernel: str, dtypes: tuple[str, ...], tmp_path: Path) -> None:
    """Also where arrays begin at any element."""
    folder, contract = sanitized_programs(f"sanitized/{kernel}", SANITIZERS, (kernel,)), load_contract(BY_NAME[kernel])
    cases = contract.small + tuple(case for case in contract.cases if case.dtype in dtypes)
    calls = [(kernel, contract, case) for case in cases]
    for offset, chosen in ((0, calls), (1, calls[: len(contract.small)])):
        write_calls(tmp_path / "calls", chosen, offset=offset)
        assert f"{len(chosen)} calls" in run(folder / "driver", folder / "kernels.so", tmp_path / "calls")
