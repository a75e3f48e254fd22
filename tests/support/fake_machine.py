"""A machine of fakes: cmake, compilers, headers and native sources of a few lines, and a cache of its own.

Test modules take the fixtures with `pytest_plugins = ["fake_machine"]`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from effexport.plugins.building import sources
from effexport.plugins.building.build import FLAG_VARIABLES
from effexport.plugins.building.library import BuildInfo, CudaInfo
from effexport.plugins.building.toolchain import ARCHITECTURES_VARIABLE, NVCC_VARIABLES

# so that wheels that are installed here are not seen
WHEEL_PACKAGE = "effexport_kernels_of_fake_machine"
CUDA_WHEEL_PACKAGE = "effexport_kernels_cuda_of_fake_machine"
CMAKE = """
import json, os, pathlib, shutil, sys, time
here, arguments = pathlib.Path(sys.argv[0]).parent, sys.argv[1:]
if arguments == ["--version"]:
    print("cmake version", (here / "cmake.version").read_text())
    sys.exit()
with (here / "cmake.calls").open("a") as stream:
    stream.write(json.dumps(arguments) + "\\n")
if "--build" in arguments:
    time.sleep(float((here / "cmake.seconds").read_text()))
    if (here / "cmake.error").exists():
        print("[1/2] Building CXX object ort.cc.o")
        print((here / "cmake.error").read_text())
        sys.exit(2)
    shutil.copy(here / "tiny.so", pathlib.Path(arguments[1], "libeffexport_ort.so"))
    pathlib.Path(arguments[1], "effexport_cuda.fatbin").write_text("CUDA kernels")
else:
    pathlib.Path(arguments[arguments.index("-B") + 1]).mkdir()
"""
COMPILER = """
import pathlib, sys
print((pathlib.Path(sys.argv[0]).parent / "c++.version").read_text())
"""
NVCC = """
import sys
codes = ("sm_50", "sm_75", "sm_80", "sm_87", "sm_90", "sm_90a")
print(*(codes if "--list-gpu-code" in sys.argv else ("nvcc:", "Cuda, release 12.4, V12.4.1")), sep="\\n")
"""


@dataclass(frozen=True)
class Machine:
    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def sources(self) -> Path:
        return self.folder / "plugins"

    def program(self, name: str, code: str) -> Path:
        """A Python script on PATH; -I and -S start it faster."""
        path = self.bin / name
        path.write_text(f"#!{sys.executable} -IS\n{code}")
        path.chmod(0o755)
        return path

    def has_gpus(self, *capabilities: str) -> None:
        """From now on, nvidia-smi shows GPUs of these compute capabilities, such as "9.0"."""
        lines = [f"{index}, GPU-{index}, {capability}" for index, capability in enumerate(capabilities)]
        self.program("nvidia-smi", f"print({chr(10).join(lines)!r})")

    def cmake_calls(self) -> list[list[str]]:
        calls = self.bin / "cmake.calls"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    def builds(self) -> list[str]:
        """Names of the present builds, finished or not."""
        known = {".lock", "selected", "logs"}
        return sorted(path.name for path in (self.cache / "kernels").iterdir() if path.name not in known)

    def install_wheel(self, **fields: Any) -> Path:
        """Install effexport-kernels with a library of the present sources; its path. fields: others of its record."""
        package = self.folder / "site" / WHEEL_PACKAGE
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        path = Path(shutil.copy(self.bin / "tiny.so", package / "libeffexport_ort.so"))
        content = path.read_bytes()
        known = {
            "key": "0" * 32,
            "source_hash": sources.source_hash(),
            "installation": "effexport-kernels 1.2.3",
            "machine": platform.machine(),
            "header_version": 21,
            "compiler": "zig c++",
            "nvcc": None,
            "cuda_architectures": (),
            "flags": {},
            "created": "2026-01-01T00:00:00+00:00",
            "seconds": 0.0,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        }
        (package / "build.json").write_bytes(msgspec.json.encode(BuildInfo(**known | fields)))
        return path

    def install_cuda_wheel(self) -> Path:
        """Install effexport-kernels-cuda; the path of its kernels."""
        package = self.folder / "site" / CUDA_WHEEL_PACKAGE
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        path = package / "effexport_cuda.fatbin"
        path.write_bytes(b"CUDA kernels")
        info = CudaInfo(
            source_hash=sources.source_hash(),
            installation="effexport-kernels-cuda 1.2.3",
            nvcc="Cuda, release 13.0, V13.0.88",
            cuda_architectures=(75, 90),
            created="2026-01-01T00:00:00+00:00",
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            bytes=path.stat().st_size,
        )
        (package / "build.json").write_bytes(msgspec.json.encode(info))
        importlib.invalidate_caches()
        return path

    def write_headers(self, folder: Path, version: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "onnxruntime_c_api.h").write_text(f"// the C API\n#define ORT_API_VERSION {version}\n")
        (folder / "onnxruntime_cxx_api.h").write_text("// the C++ API\n")
        return folder

    def python(self, code: str, **options: Any) -> subprocess.Popen[str]:
        """Code in a process of its own, on this machine; `library` is what build_library() returned."""
        head = (
            "from pathlib import Path\nfrom effexport.plugins.building import sources\n"
            "from effexport.plugins.building.build import *\n"
            f"sources.FOLDER = Path({str(self.sources)!r})\n"
        )
        command = [sys.executable, "-c", head + code]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="session")
def tiny_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that loads and has the entry point."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.cc").write_text('extern "C" void RegisterCustomOps() {}\n')
    subprocess.run(["c++", "-shared", "-fPIC", "-o", folder / "tiny.so", folder / "tiny.cc"], check=True)
    return folder / "tiny.so"


@pytest.fixture
def machine(tmp_path: Path, tiny_library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Everything that a CPU-only build needs, and nothing of the real machine."""
    machine = Machine(tmp_path / "machine")
    machine.bin.mkdir(parents=True)
    for name, code in (("cmake", CMAKE), ("c++", COMPILER), ("ninja", "")):
        machine.program(name, code)
    for name, text in (("cmake.version", "3.30.1"), ("cmake.seconds", "0"), ("c++.version", "c++ 14.1")):
        (machine.bin / name).write_text(text)
    shutil.copy(tiny_library, machine.bin)
    for name in sources.all_sources():
        (machine.sources / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.sources / name).write_text(f"// {name}\n")
    monkeypatch.setattr(sources, "FOLDER", machine.sources)
    # the cmake that pip puts beside this Python is not on this machine
    monkeypatch.setattr(
        "effexport.plugins.building.toolchain.sys", type("", (), {"executable": str(machine.bin / "python")})
    )
    monkeypatch.setattr("effexport.plugins.building.toolchain.DEFAULT_NVCC", str(machine.folder / "absent"))
    monkeypatch.setattr("effexport.plugins.building.toolchain.DRIVER", str(machine.folder / "absent"))
    monkeypatch.setattr("effexport.plugins.building.library.WHEEL_PACKAGE", WHEEL_PACKAGE)
    monkeypatch.setattr("effexport.plugins.building.library.CUDA_WHEEL_PACKAGE", CUDA_WHEEL_PACKAGE)
    monkeypatch.syspath_prepend(machine.folder / "site")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(machine.bin))
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(machine.cache))
    monkeypatch.setenv("EFFEXPORT_ORT_INCLUDE_DIR", str(machine.write_headers(machine.folder / "include", 21)))
    for name in ("EFFEXPORT_LIBRARY", ARCHITECTURES_VARIABLE, *NVCC_VARIABLES, "CXX", *FLAG_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return machine


@pytest.fixture
def nvcc(machine: Machine) -> Path:
    """The machine has an nvcc that knows four of our architectures."""
    return machine.program("nvcc", NVCC)
