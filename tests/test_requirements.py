"""The declared-requirements rule of conftest.py, tried on a small suite in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITE = """
import pytest

@pytest.mark.requires("transformers")
def test_with_transformers():
    pass

def test_plain():
    pass
"""
# makes find_spec believe that transformers is not installed
HIDE_TRANSFORMERS = """
import importlib.util

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
"""


def run_suite(folder: Path, require: str, suite: str = SUITE) -> subprocess.CompletedProcess[str]:
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "test_suite.py").write_text(suite)
    (folder / "hide.py").write_text(HIDE_TRANSFORMERS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nmarkers = requires(*parts): parts\n")
    environment = {**os.environ, "EFFEXPORT_REQUIRE": require, "PYTHONPATH": str(folder)}
    # the options of the run that this test belongs to are not for the inner one
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "hide",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-rs",
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_missing_part_is_skipped_with_its_reason_when_it_is_not_required(tmp_path: Path) -> None:
    result = run_suite(tmp_path, require="")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped" in result.stdout
    assert "transformers is not there" in result.stdout


def test_a_missing_part_stops_the_run_when_it_is_required(tmp_path: Path) -> None:
    result = run_suite(tmp_path, require="transformers")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "EFFEXPORT_REQUIRE requires transformers" in result.stdout + result.stderr
    assert "passed" not in result.stdout


@pytest.mark.parametrize("require", ["tensorflow", "onnx,", "onnx,onnx", "Onnx"])
def test_a_list_that_is_not_understood_stops_the_run(tmp_path: Path, require: str) -> None:
    result = run_suite(tmp_path, require=require)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "EFFEXPORT_REQUIRE names" in result.stdout + result.stderr


def test_a_marker_with_an_unknown_part_fails_its_test(tmp_path: Path) -> None:
    result = run_suite(tmp_path, require="", suite=SUITE.replace("transformers", "tensorflow"))
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "names no known part" in result.stdout


def test_the_summary_names_the_required_parts(tmp_path: Path) -> None:
    result = run_suite(tmp_path, require="torch, onnx", suite="def test_plain(): pass")
    assert result.returncode == 0, result.stdout
    assert "required parts, all present: torch " in result.stdout


NATIVE_SUITE = """
import pytest

@pytest.mark.requires("native")
def test_with_the_kernel_library():
    pass

@pytest.mark.requires("nvcc")
def test_with_nvcc():
    pass
"""


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kernel library and no nvcc, whatever this machine has."""
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.delenv("EFFEXPORT_LIBRARY", raising=False)
    monkeypatch.setenv("EFFEXPORT_NVCC", str(tmp_path / "absent"))
    return tmp_path


def test_parts_that_are_no_python_modules_are_skipped_by_the_same_rule(bare_machine: Path) -> None:
    result = run_suite(bare_machine, require="", suite=NATIVE_SUITE)
    assert result.returncode == 0, result.stdout
    assert "2 skipped" in result.stdout
    assert "nvcc is not there" in result.stdout
    assert "kernel library of the present sources (effexport plugins build) is not there" in result.stdout


@pytest.mark.parametrize("part", ["native", "nvcc"])
def test_parts_that_are_no_python_modules_stop_the_run_by_the_same_rule(bare_machine: Path, part: str) -> None:
    result = run_suite(bare_machine, require=part, suite=NATIVE_SUITE)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"EFFEXPORT_REQUIRE requires {part}" in result.stdout + result.stderr
    assert "passed" not in result.stdout


def test_parts_that_are_no_python_modules_are_found(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, name in (("EFFEXPORT_LIBRARY", "given.so"), ("EFFEXPORT_NVCC", "nvcc")):
        (bare_machine / name).touch(mode=0o755)
        monkeypatch.setenv(variable, str(bare_machine / name))
    result = run_suite(bare_machine, require="native,nvcc", suite=NATIVE_SUITE)
    assert result.returncode == 0, result.stdout
    assert "2 passed" in result.stdout


def test_a_library_that_is_named_and_not_there_stops_the_run(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFEXPORT_LIBRARY", str(bare_machine / "absent.so"))
    result = run_suite(bare_machine, require="native", suite=NATIVE_SUITE)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "EFFEXPORT_LIBRARY is" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


TENSORRT_SUITE = """
import pytest

@pytest.mark.requires("tensorrt")
def test_with_tensorrt():
    pass
"""


@pytest.fixture
def tensorrt_tree(tmp_path: Path) -> Path:
    """What the part `tensorrt` is judged by, with stamps as scripts/environment.sh writes them."""
    names = ["conformance-requirements-11.txt", "conformance-requirements-10.txt", "environment.sh"]
    (tmp_path / "tests" / "plugins" / "tensorrt").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    for name in (*(f"scripts/{name}" for name in names), "tests/plugins/tensorrt/shim.c"):
        shutil.copy(HERE.parent / name, tmp_path / name)
    for major in ("11", "10"):
        folder = tmp_path / ".venv-tensorrt" / major
        folder.mkdir(parents=True)
        command = f"source scripts/environment.sh && conformance_stamp {major}"
        stamp = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
        (folder / "effexport.stamp").write_text(stamp.stdout)
    return tmp_path


def test_environments_for_tensorrt_of_the_present_files_are_found(tensorrt_tree: Path) -> None:
    result = run_suite(tensorrt_tree / "tests", require="tensorrt", suite=TENSORRT_SUITE)
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout
    assert "tensorrt 11.4.0.106 and 10.16.1.11" in result.stdout


@pytest.mark.parametrize("name", ["scripts/conformance-requirements-10.txt", "tests/plugins/tensorrt/shim.c"])
def test_environments_for_tensorrt_of_earlier_files_count_as_missing(tensorrt_tree: Path, name: str) -> None:
    with (tensorrt_tree / name).open("a") as stream:
        stream.write("\n")
    result = run_suite(tensorrt_tree / "tests", require="", suite=TENSORRT_SUITE)
    assert "1 skipped" in result.stdout
    assert "scripts/conformance.sh) is not there" in result.stdout
    result = run_suite(tensorrt_tree / "tests", require="tensorrt", suite=TENSORRT_SUITE)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR


def test_the_environment_with_tritonserver_counts_only_as_made_from_the_present_requirements(tmp_path: Path) -> None:
    for folder in ("scripts", "tests", ".venv-triton"):
        (tmp_path / folder).mkdir()
    for name in ("triton-requirements.txt", "environment.sh"):
        shutil.copy(HERE.parent / "scripts" / name, tmp_path / "scripts")
    command = "source scripts/environment.sh && triton_stamp"
    stamp = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / ".venv-triton" / "effexport.stamp").write_text(stamp.stdout)
    suite = TENSORRT_SUITE.replace("tensorrt", "triton")
    result = run_suite(tmp_path / "tests", require="triton", suite=suite)
    assert "1 passed" in result.stdout
    assert "triton 2.51.0" in result.stdout
    with (tmp_path / "scripts" / "triton-requirements.txt").open("a") as stream:
        stream.write("\n")
    result = run_suite(tmp_path / "tests", require="", suite=suite)
    assert "environment with tritonserver (scripts/test.sh makes it) is not there" in result.stdout
    result = run_suite(tmp_path / "tests", require="triton", suite=suite)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR


def required_parts(folder: Path, *, uname: str, variables: dict[str, str], browser: bool = False) -> str:
    """What scripts/environment.sh requires on a machine that calls itself so, where there is no nvcc."""
    stubs = f"has_tool() {{ false; }}; has_browser() {{ {'true' if browser else 'false'}; }}"
    script = f'source "{HERE.parent}/scripts/environment.sh"; {stubs}; required_parts'
    (folder / "uname").write_text(f"#!/bin/sh\necho {uname}\n")
    (folder / "uname").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "EFFEXPORT_REQUIRE"}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_tensorrt_is_required_where_its_packages_exist(tmp_path: Path) -> None:
    everywhere = "torch,onnx,ort,transformers,native,ray,serve,ray-serve"
    # its wheel asks for a C library that this machine may not have
    modern = subprocess.run(
        ["bash", "-c", f'source "{HERE.parent}/scripts/environment.sh"; can_have_triton'], check=False
    )
    triton = "" if modern.returncode else ",triton"
    assert required_parts(tmp_path, uname="Linux x86_64", variables={}) == f"{everywhere},tensorrt,rtx{triton}"
    assert required_parts(tmp_path, uname="Darwin arm64", variables={}) == everywhere
    given = {"EFFEXPORT_REQUIRE": "torch, onnx"}
    assert required_parts(tmp_path, uname="Linux x86_64", variables=given) == "torch, onnx"


def test_a_browser_is_required_where_there_is_one(tmp_path: Path) -> None:
    parts = required_parts(tmp_path, uname="Darwin arm64", variables={}, browser=True)
    assert parts == "torch,onnx,ort,transformers,native,ray,serve,ray-serve,browser"


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_the_script_finds_the_browsers_that_the_tests_find(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch(mode=0o755)
    # sourced with the usual PATH, which it needs
    script = f'source "{HERE.parent}/scripts/environment.sh"; PATH="{tmp_path}"; has_browser'
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0
    script = f'source "{HERE.parent}/scripts/environment.sh"; PATH="{tmp_path / "empty"}"; has_browser'
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 1
