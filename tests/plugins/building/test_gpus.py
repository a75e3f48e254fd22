"""GPUs and driver of this machine: from nvidia-smi, or from the driver itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from effexport.plugins.building import toolchain as gpus
from effexport.plugins.building.toolchain import Gpu, driver_cuda, gpus_here

TWO_GPUS = """
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetUuid(char* uuid, int device) { memset(uuid, 0xa0 + device, 16); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 8 + device : attribute == 76 ? 6 - 6 * device : -1;
  return 0;
}
"""


def program(folder: Path, code: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, on a machine without a driver."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(gpus, "DRIVER", str(tmp_path / "absent"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin"


def install_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: int = 0) -> None:
    monkeypatch.undo()  # the compiler is on the real PATH
    monkeypatch.setattr(gpus, "DRIVER", str(folder / "driver.so"))
    command = ["cc", "-x", "c", "-", "-shared", "-fPIC", f"-DFAILS={fails}", "-o", folder / "driver.so"]
    subprocess.run(command, input=TWO_GPUS, text=True, check=True)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_nvidia_smi_and_driver_there_is_no_gpu(bin_folder: Path) -> None:
    assert gpus_here() == ()
    assert driver_cuda() is None


def test_nvidia_smi_is_asked_first(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bin_folder, 'echo "0, GPU-aa, 9.0"; echo "1, GPU-bb, 12.0"')
    assert gpus_here() == (Gpu("GPU-aa", "sm_90"), Gpu("GPU-bb", "sm_120"))
    assert [gpu.sm for gpu in gpus_here()] == [90, 120]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus_here() == (Gpu("GPU-bb", "sm_120"),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_here() == ()


@pytest.mark.parametrize("smi", [None, "exit 9", 'echo "Field compute_cap is not a valid field to query."; exit 2'])
def test_without_an_answer_of_nvidia_smi_the_driver_is_asked(
    bin_folder: Path, smi: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if smi is not None:
        program(bin_folder, smi)
    install_driver(bin_folder.parent, monkeypatch)
    assert driver_cuda() == (12, 4)
    first, second = gpus_here()
    assert first == Gpu("GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0", "sm_86")
    assert second == Gpu("GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1", "sm_90")


def test_a_driver_without_a_gpu_that_works_has_none(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(bin_folder.parent, monkeypatch, fails=100)
    assert driver_cuda() == (12, 4)
    assert gpus_here() == ()
