"""gpu.device and gpu.building: for which GPU kernels are compiled, and what is refused before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpu import building
from gpu.device import Device, Kernels, SetupError
from gpu.stages import Run

GPU = Device(emulated=False)
HEADER = "| NVIDIA-SMI 580.159.04    Driver Version: 580.159.04    CUDA Version: 13.0     |"


def install(folder: Path, name: str, **answers: str) -> None:
    """A program that answers by the option that contains a word, with _ for -."""
    cases = "\n".join(f"*{word.replace('_', '-')}*) echo '{text}' ;;" for word, text in answers.items())
    (folder / name).write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\nesac\n', encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs of a machine with an H100, nvcc 13 and its driver."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    install_driver(tmp_path)
    install_nvcc(tmp_path)
    return tmp_path


def install_driver(folder: Path, capability: str = "9.0", header: str = HEADER) -> None:
    install(folder, "nvidia-smi", query_gpu=capability, **{"": header})


def install_nvcc(folder: Path, codes: str = "sm_75\nsm_90\nsm_100", release: str = "13.0") -> None:
    version = f"Cuda compilation tools, release {release}, V{release}.88"
    install(folder, "nvcc", list_gpu_code=codes, version=version)


def test_a_machine_with_everything_is_accepted(machine: Path) -> None:
    GPU.check_setup()
    assert GPU.architecture() == 90
    install_driver(machine, "12.0", header="no version at all")
    install_nvcc(machine, "sm_120")
    GPU.check_setup()
    assert GPU.architecture() == 120


def test_an_nvcc_that_does_not_know_the_gpu_is_refused(machine: Path) -> None:
    install_driver(machine, "10.3")
    with pytest.raises(SetupError, match="nvcc compiles for sm_75, sm_90, sm_100; expected sm_103, which this GPU has"):
        GPU.check_setup()


@pytest.mark.parametrize("answer", ["", "[N/A]", "Field compute_cap is not a valid field to query."])
def test_a_driver_that_does_not_tell_the_gpu_is_refused(machine: Path, answer: str) -> None:
    install_driver(machine, answer)
    with pytest.raises(SetupError, match="expected the compute capability"):
        GPU.check_setup()


@pytest.mark.parametrize("name", ["CUDA Version", "CUDA UMD Version"])
def test_a_driver_older_than_nvcc_is_refused_by_major_release(machine: Path, name: str) -> None:
    install_driver(machine, header=HEADER.replace("CUDA Version: 13.0", f"{name}: 12.9"))
    with pytest.raises(SetupError, match=r"runs programs of CUDA 12, .*nvcc makes those of CUDA 13; expected"):
        GPU.check_setup()
    install_nvcc(machine, release="12.9")
    GPU.check_setup()


def test_machine_code_for_another_gpu_is_an_error(machine: Path) -> None:
    library = machine / "kernels.so"
    lines = "ELF file    1: a.1.sm_90.cubin\nELF file    2: b.2.sm_90.cubin"
    install(machine, "cuobjdump", list_elf=lines)
    assert building.machine_code_of(library, 90) == "2 files for sm_90"
    for text in (lines.replace("1.sm_90", "1.sm_75"), lines.replace("sm_90", "sm_90a"), ""):
        install(machine, "cuobjdump", list_elf=text)
        with pytest.raises(RuntimeError, match="expected sm_90 alone"):
            building.machine_code_of(library, 90)


def test_without_cuobjdump_the_machine_code_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvcc(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert building.machine_code_of(tmp_path / "kernels.so", 90) == "unknown: cuobjdump is missing"


def test_kernels_of_another_gpu_are_refused_when_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "library.cc", tmp_path / "kernels.so"
    source.write_text(
        'extern "C" { int effexport_architecture() { return 90; } const char* effexport_error_name(int) { return ""; }'
        " void effexport_set_schedule(unsigned, unsigned) {} }"
    )
    run = Run(GPU, tmp_path, tmp_path, (), "")
    building.call([building.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert isinstance(building.load_kernels(run), Kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(SetupError, match="compiled for sm_90; expected sm_80, which PyTorch's GPU has"):
        building.load_kernels(run)
