"""The wheel of effexport-kernels: the same bytes twice, for a glibc of 2012, and right where there is no compiler.

tests/test_supported_runtimes.py runs the kernels of the one for aarch64.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import kernels_wheel
import pytest
import release_documents

import effexport
from effexport.base.version import __version__
from effexport.plugins.building.library import (
    CUDA_NAME,
    CUDA_WHEEL_PACKAGE,
    LIBRARY_NAME,
    WHEEL_PACKAGE,
    BuildInfo,
    CudaInfo,
    read_record,
)

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
ROOT = Path(__file__).parents[1]
HERE = next((name for name, target in kernels_wheel.TARGETS.items() if target.is_here), "linux-x86_64")
EPOCH = "1700000000"
compiled = [
    pytest.mark.soak,
    pytest.mark.requires("native", "torch", "onnx", "ort"),
    pytest.mark.xdist_group("kernels wheel"),
]


def small_wheel(machine: Machine, out: Path) -> Path:
    """A wheel with a library that only loads."""
    library = machine.install_wheel()
    info = read_record(library.with_name("build.json"), BuildInfo)
    out.mkdir(exist_ok=True)
    contents = kernels_wheel.library_for(kernels_wheel.TARGETS[HERE])
    return kernels_wheel.write_wheel(contents, library.read_bytes(), info, out)


def small_cuda_wheel(machine: Machine, out: Path) -> Path:
    """A wheel with what no GPU can run."""
    kernels = machine.install_cuda_wheel()
    info = read_record(kernels.with_name("build.json"), CudaInfo)
    return kernels_wheel.write_wheel(kernels_wheel.CUDA_KERNELS, kernels.read_bytes(), info, out)


@pytest.mark.skipif(platform.system() != "Linux", reason="the wheels are for Linux")
def test_pip_installs_the_wheel_whose_bytes_depend_on_its_contents_only(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    wheel = small_wheel(machine, tmp_path / "one")
    assert re.fullmatch(rf"effexport_kernels-{__version__}-py3-none-manylinux_2_17_\w+\.whl", wheel.name)
    assert small_wheel(machine, tmp_path / "two").read_bytes() == wheel.read_bytes()
    cuda = small_cuda_wheel(machine, tmp_path / "one")
    assert cuda.name == f"effexport_kernels_cuda-{__version__}-py3-none-any.whl"
    assert small_cuda_wheel(machine, tmp_path / "two").read_bytes() == cuda.read_bytes()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, tmp_path / "site", wheel, cuda], check=True, env=os.environ | {"PIP_NO_INPUT": "1"})
    installed = tmp_path / "site" / WHEEL_PACKAGE
    assert (installed / LIBRARY_NAME).read_bytes() == (machine.bin / "tiny.so").read_bytes()
    assert {path.name for path in installed.iterdir()} >= {"__init__.py", LIBRARY_NAME, "build.json"}
    installed = tmp_path / "site" / CUDA_WHEEL_PACKAGE
    assert {path.name for path in installed.iterdir()} >= {"__init__.py", CUDA_NAME, "build.json"}


def test_the_wheel_of_the_present_sources_is_found(machine: Machine, tmp_path: Path) -> None:
    wheel = small_wheel(machine, tmp_path)
    assert kernels_wheel.find_wheel([tmp_path / "absent", tmp_path]) == wheel
    (machine.sources / "native" / "ort_op.h").write_text("// changed")
    assert kernels_wheel.find_wheel([tmp_path]) is None
    small_wheel(machine, tmp_path)
    assert kernels_wheel.find_wheel([tmp_path]) == wheel
    wheel.write_bytes(wheel.read_bytes()[:-50])
    assert kernels_wheel.find_wheel([tmp_path]) is None


@pytest.mark.requires("torch", "onnx")
def test_the_documents_of_a_release_name_every_file_with_its_digest(machine: Machine, tmp_path: Path) -> None:
    digest = hashlib.sha256(small_wheel(machine, tmp_path).read_bytes()).hexdigest()
    digests = {"effexport.whl": digest}
    bom = release_documents.bill_of_materials(digests, "2023-11-14T22:13:20+00:00")
    (file,) = bom["metadata"]["component"]["components"]
    assert (file["name"], file["hashes"]) == ("effexport.whl", [{"alg": "SHA-256", "content": digest}])
    assert {"pkg:pypi/numpy", "pkg:pypi/ml-dtypes"} <= {
        library.get("purl", "").partition("@")[0] for library in bom["components"]
    }
    assert bom == release_documents.bill_of_materials(digests, "2023-11-14T22:13:20+00:00")
    statement = release_documents.provenance(digests, "0" * 40, int(EPOCH))
    assert statement["subject"] == [{"name": "effexport.whl", "digest": {"sha256": digest}}]
    assert statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"] == {"gitCommit": "0" * 40}


def compile_wheel(out: Path, target: str = HERE, **variables: str) -> Path:
    command = [sys.executable, ROOT / "scripts" / "kernels_wheel.py", "--out", out, target]
    subprocess.run(command, check=True, env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH} | variables)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this machine, compiled from the tree."""
    return compile_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


class TestCompiled:
    pytestmark = compiled

    def test_auditwheel_agrees_with_the_tag(self, wheel: Path) -> None:
        command = [sys.executable, "-m", "auditwheel", "show", wheel]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f'"manylinux_2_17_{platform.machine()}"' in shown

    def test_a_second_build_in_another_folder_gives_the_same_bytes(self, wheel: Path, tmp_path: Path) -> None:
        """Nothing of the first is reused: zig has caches of its own."""
        (tmp_path / "temporary").mkdir()
        caches = {f"ZIG_{name}_CACHE_DIR": str(tmp_path / name) for name in ("GLOBAL", "LOCAL")}
        again = compile_wheel(tmp_path / "out", TMPDIR=str(tmp_path / "temporary"), **caches)
        assert again.read_bytes() == wheel.read_bytes()

    @pytest.mark.requires("nvcc")
    def test_the_cuda_kernels_for_every_gpu_are_8_megabytes_at_most(self, tmp_path: Path) -> None:
        assert compile_wheel(tmp_path, kernels_wheel.CUDA_TARGET).stat().st_size <= 8_000_000

    def test_kernels_run_where_there_is_no_compiler(self, site: Path, tmp_path: Path) -> None:
        environment = {"PATH": str(tmp_path), "PYTHONPATH": str(site), "EFFEXPORT_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "effexport", "doctor", "--load", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        library = json.loads(done.stdout)["library"]
        assert library["path"] == str(site / WHEEL_PACKAGE / LIBRARY_NAME)
        assert library["origin"].startswith(f"effexport-kernels {effexport.__version__}, SHA-256 ")
        assert (library["outdated"], library["problem"]) == (False, None)

    @pytest.mark.parametrize("instructions", ["avx512", "avx2", "baseline"])
    def test_its_kernels_keep_the_contract_with_every_instruction_set(self, instructions: str, site: Path) -> None:
        """One that the machine lacks is the best that it has."""
        environment = os.environ | {
            "EFFEXPORT_LIBRARY": str(site / WHEEL_PACKAGE / LIBRARY_NAME),
            "EFFEXPORT_TEST_INSTRUCTIONS": instructions,
            "EFFEXPORT_REQUIRE": "",
        }
        files = [f"tests/plugins/test_{name}.py" for name in ("contract", "aft_simple_attention")]
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files, "-k", "kernel"]
        done = subprocess.run([*command, "-m", ""], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:]
        assert "skipped" not in done.stdout
