"""A kernel library with CUDA kernels that the driver of the machine cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from effexport.plugins.building.build import find_headers
from effexport.plugins.building.library import find_library

pytestmark = pytest.mark.requires("native")
ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests" / "plugins" / "native"
EXAMPLE = ROOT / "examples" / "my_operator"
# What no compiler of CUDA has made, because none is needed to register it.
LAUNCHES = """
#include "gated_rms_norm/kernel.h"
namespace effexport::gated_rms_norm {
template <class T>
int launch_cuda(const Problem<T>&, void*) { return 0; }
template int launch_cuda(const Problem<float>&, void*);
template int launch_cuda(const Problem<Half>&, void*);
template int launch_cuda(const Problem<BFloat16>&, void*);
}
"""
OLD = (
    "its CUDA kernels were compiled by CUDA 13.0, and the NVIDIA driver here is for CUDA 12.4; update the driver to "
    "one for CUDA 13 (580 or later), or set EFFEXPORT_NVCC to the nvcc of CUDA 12 and run: effexport plugins build "
    "--cuda"
)
CHOOSE = """
import sys, warnings
from effexport.base.errors import UserError
from effexport.runners.ort.kernels import kernels_for
from effexport.runners.options import RunOptions
warnings.simplefilter("default")
runtime, implementation = sys.argv[1:]
for _ in range(3):
    try:
        options = RunOptions(runtime=runtime, implementation=implementation)
        print(kernels_for(["MaskedAttention", "LSHSort"], (), options).ops)
    except UserError as error:
        print("refused:", error)
"""


@dataclass(frozen=True)
class Built:
    """A small library with CUDA kernels, the program that counts what a library registers, and drivers."""

    folder: Path

    def environment(self, driver: int | None) -> dict[str, str]:
        """With a driver for a release of CUDA, such as 12040; None for the machine's own, if it has one."""
        environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        if driver is None:
            return environment
        folder = self.folder / str(driver)
        folder.mkdir(exist_ok=True)
        code = f"int cuDriverGetVersion(int* version) {{ *version = {driver}; return 0; }}"
        command = ["cc", "-x", "c", "-", "-shared", "-fPIC", "-o", folder / "libcuda.so.1"]
        subprocess.run(command, input=code, text=True, check=True)
        return environment | {"LD_LIBRARY_PATH": str(folder)}

    def registered(self, library: Path, driver: int) -> subprocess.CompletedProcess[str]:
        command = [self.folder / "registrations", library]
        return subprocess.run(
            command, env=self.environment(driver), capture_output=True, text=True, check=True, timeout=60
        )

    def chosen(self, driver: int, *settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", CHOOSE, *settings]
        environment = self.environment(driver) | {"EFFEXPORT_LIBRARY": str(self.folder / "library.so")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "ort_ops.inc").write_text("EFFEXPORT_OP(gated_rms_norm)\n")
    (folder / "launches.cc").write_text(LAUNCHES)
    headers = f"-I{find_headers(lambda stage: None).folder}"
    includes = [f"-I{path}" for path in (folder, ROOT / "plugins", EXAMPLE, NATIVE / "no_toolkit")]
    sources = [ROOT / "plugins" / "native" / "ort_library.cc", folder / "launches.cc"]
    sources += [EXAMPLE / "gated_rms_norm" / name for name in ("ort.cc", "kernel_cpu.cc")]
    options = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-DEFFEXPORT_CUDA"]
    library = ["c++", *options, *includes, headers, *sources, "-o", folder / "library.so", "-pthread", "-ldl"]
    subprocess.run(library, check=True)
    program = ["c++", "-std=c++17", headers, NATIVE / "registrations.cc", "-o", folder / "registrations", "-ldl"]
    subprocess.run(program, check=True)
    return Built(folder)


@pytest.mark.parametrize("driver", [0, 13000, 13020, 14000])
def test_with_a_driver_of_the_same_major_version_or_none_cuda_kernels_are_registered(built: Built, driver: int) -> None:
    done = built.registered(built.folder / "library.so", driver)
    assert (done.stdout, done.stderr) == ("3 3 \n", "")


def test_with_an_older_driver_only_cpu_kernels_are_registered_which_is_said_once(built: Built) -> None:
    done = built.registered(built.folder / "library.so", 12040)
    assert done.stdout == f"3 0 {OLD}\n"
    assert done.stderr == f"effexport: the kernel library has kernels for the CPU only here, because {OLD}\n"


@pytest.mark.requires("ort")
@pytest.mark.parametrize("implementation", ["auto", "MaskedAttention=auto"])
def test_with_an_older_driver_auto_falls_back_to_bodies_with_one_warning(built: Built, implementation: str) -> None:
    done = built.chosen(12040, "ort-cuda", implementation)
    assert done.stdout == "()\n" * 3
    assert done.stderr.count("KernelWarning") == 1
    assert f"library.so has kernels for the CPU only here, because {OLD}\n" in done.stderr
    assert "custom operators run as function bodies" in done.stderr


@pytest.mark.requires("ort")
@pytest.mark.parametrize("implementation", ["kernel", "LSHSort=kernel"])
def test_with_an_older_driver_requested_kernels_are_one_error(built: Built, implementation: str) -> None:
    done = built.chosen(12040, "ort-cuda", implementation)
    library = built.folder / "library.so"
    message = f"kernels were requested, but {library} has kernels for the CPU only here, because {OLD}"
    assert done.stdout == f"refused: {message}\n" * 3
    assert done.stderr == ""


@pytest.mark.requires("ort")
@pytest.mark.parametrize(("driver", "provider"), [(12040, "ort"), (0, "ort"), (0, "ort-cuda"), (13000, "ort-cuda")])
def test_otherwise_kernels_run_and_nothing_is_said(built: Built, driver: int, provider: str) -> None:
    done = built.chosen(driver, provider, "auto")
    assert (done.stdout, done.stderr) == ("('MaskedAttention', 'LSHSort')\n" * 3, "")


@pytest.mark.requires("ort", "nvcc")
def test_the_library_of_this_installation_looks_at_the_driver(built: Built) -> None:
    library = find_library()
    assert library is not None
    assert library.info is not None
    assert library.info.has_cuda, "build it with: effexport plugins build --cuda"
    compiled_by = library.info.nvcc.partition("release ")[2].partition(",")[0]  # type: ignore[union-attr]
    older = 1000 * (int(compiled_by.partition(".")[0]) - 1)
    cpu, cuda, problem = built.registered(library.path, older).stdout.split(" ", 2)
    assert int(cpu) > 20
    assert int(cuda) == 0
    assert problem.startswith(f"its CUDA kernels were compiled by CUDA {compiled_by}, and the NVIDIA driver here is ")
    assert built.registered(library.path, older + 1000).stdout == f"{cpu} {cpu} \n"
    code = "import sys, onnxruntime as ort; ort.SessionOptions().register_custom_ops_library(sys.argv[1])"
    command = [sys.executable, "-P", "-c", code, library.path]
    done = subprocess.run(command, env=built.environment(older), capture_output=True, text=True, check=True)
    assert done.stderr.count("has kernels for the CPU only here, because its CUDA kernels") == 1
