"""The shared object that a run on a GPU uses, compiled for one; this machine need not have it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from gpu import building
from gpu.device import Device
from gpu.stages import Run

from effexport.plugins.ops import CUDA_OPS

# One of one launch and one of several; test_cuda_kernels.py compiles every kernel in every run.
SOME = ("lsh_sort", "segment_means")


@pytest.mark.slow
@pytest.mark.requires("nvcc")
@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param(tuple(op.torch_name for op in CUDA_OPS.values()), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_nvcc_makes_one_library_with_a_function_for_every_operator(names: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(Device(emulated=False), tmp_path, tmp_path, names, "")
    seconds, messages = building.make_library(run, building.nvcc_toolchain(90), tmp_path / "kernels.so", names)
    assert len(seconds) == 2 * len(names) + 1
    library = ctypes.CDLL(str(tmp_path / "kernels.so"), mode=os.RTLD_NOW)
    for name in names:
        assert library[f"effexport_check_{name}"]
        assert library[f"effexport_check_{name}_scratch"]
    assert library.effexport_architecture() == 90
    assert building.machine_code_of(tmp_path / "kernels.so", 90).endswith(("files for sm_90", "cuobjdump is missing"))
    library.effexport_error_name.restype = ctypes.c_char_p
    assert library.effexport_error_name(1) == b"cudaErrorInvalidValue"
    used = building.resources(messages)
    assert all(any(name.removesuffix("_attention") in entry for entry in used) for name in names)
