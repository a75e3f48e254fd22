"""The declared-requirements rule of conftest.py, tried on a small suite in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
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
SCRIPTS = ("environment.sh", "test_environment.sh")
# makes find_spec believe that transformers is not installed
HIDE_TRANSFORMERS = """
import importlib.util

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
"""


def run_suite(
    folder: Path, *options: str, require: str, suite: str = SUITE, soak: str = ""
) -> subprocess.CompletedProcess[str]:
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "soak.toml").write_text(soak)
    (folder / "test_suite.py").write_text(suite)
    (folder / "hide.py").write_text(HIDE_TRANSFORMERS)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\nmarkers =\n  requires(*parts): parts\n  slow: slow\n  soak: soak\n"
    )
    environment = {**os.environ, "EFFEXPORT_REQUIRE": require, "PYTHONPATH": f"{folder}:{HERE.parent / 'scripts'}"}
    # the options of the run that this test belongs to are not for the inner one, which needs no plugins either
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "hide", "-p", "no:cacheprovider", "-rs", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_run_has_the_rows_that_soak_toml_keeps_and_a_row_that_is_named(tmp_path: Path) -> None:
    suite = """
import pytest

@pytest.mark.parametrize("row", [pytest.param(1, marks=pytest.mark.soak), 2, 3, 4])
def test_rows(row):
    pass

def test_rare():
    pass
"""
    soak = """["test_suite.py"]\ntest_rows = 2\ntest_rare = 0\n"""
    for options, ended in {
        ("-m", "not soak"): "2 passed, 3 deselected",
        ("-m", "soak"): "3 passed, 2 deselected",
        ("-m", "not soak", "test_suite.py::test_rows[4]"): "1 passed",
    }.items():
        result = run_suite(tmp_path, *options, require="", suite=suite, soak=soak)
        assert ended in result.stdout, result.stdout


def test_soak_toml_names_tests_that_there_are() -> None:
    for file, rows in tomllib.loads((HERE / "soak.toml").read_text(encoding="utf-8")).items():
        text = (HERE / file).read_text(encoding="utf-8")
        for test in rows:
            assert f"def {test}(" in text, f"{file} has no {test}"


def test_a_missing_part_is_skipped_with_its_reason_when_it_is_not_required(tmp_path: Path) -> None:
    result = run_suite(tmp_path, require="")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped" in result.stdout
    assert "transformers is missing" in result.stdout


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
    assert "names an unknown part" in result.stdout


def test_a_test_that_requires_a_slow_part_is_slow(tmp_path: Path) -> None:
    suite = SUITE.replace("transformers", "ray")
    result = run_suite(tmp_path, "-m", "not slow", require="", suite=suite)
    assert "1 passed, 1 deselected" in result.stdout


def test_the_summary_lists_the_slowest_files_first(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text("import time\n\ndef test_that_sleeps():\n    time.sleep(0.3)\n")
    result = run_suite(tmp_path, require="", suite="def test_plain(): pass")
    listed = result.stdout.split("slowest files")[1]
    assert re.search(r"0\.[3-9]  test_long\.py\n +0\.0  test_suite\.py\n", listed), result.stdout


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
    assert "nvcc is missing" in result.stdout
    assert "kernel library of the present sources (effexport plugins build) is missing" in result.stdout


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
    """The files that decide on the part `tensorrt`, with stamps as scripts/test_environment.sh writes them."""
    names = [
        "conformance-requirements-11.txt",
        "conformance-requirements-10.txt",
        "environment.sh",
        "test_environment.sh",
    ]
    (tmp_path / "tests" / "plugins" / "tensorrt").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    for name in (*(f"scripts/{name}" for name in names), "tests/plugins/tensorrt/shim.c"):
        shutil.copy(HERE.parent / name, tmp_path / name)
    for major in ("11", "10"):
        folder = tmp_path / ".venv-tensorrt" / major
        folder.mkdir(parents=True)
        command = f"source scripts/test_environment.sh && stamp_of scripts/conformance-requirements-{major}.txt "
        command += "tests/plugins/tensorrt/shim.c"
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
    assert "scripts/conformance.sh) is missing" in result.stdout
    result = run_suite(tensorrt_tree / "tests", require="tensorrt", suite=TENSORRT_SUITE)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(("part", "version"), [("triton", "2.51.0"), ("transformers5", "5.23.0")])
def test_an_environment_of_its_own_counts_only_as_made_from_the_present_requirements(
    tmp_path: Path, part: str, version: str
) -> None:
    for folder in ("scripts", "tests", f".venv-{part}"):
        (tmp_path / folder).mkdir()
    for name in (f"{part}-requirements.txt", *SCRIPTS):
        shutil.copy(HERE.parent / "scripts" / name, tmp_path / "scripts")
    command = f"source scripts/test_environment.sh && stamp_of scripts/{part}-requirements.txt"
    stamp = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / f".venv-{part}" / "effexport.stamp").write_text(stamp.stdout)
    suite = TENSORRT_SUITE.replace("tensorrt", part)
    result = run_suite(tmp_path / "tests", require=part, suite=suite)
    assert "1 passed" in result.stdout
    assert f"{part} {version}" in result.stdout
    with (tmp_path / "scripts" / f"{part}-requirements.txt").open("a") as stream:
        stream.write("\n")
    result = run_suite(tmp_path / "tests", require="", suite=suite)
    assert "(scripts/test.sh --all makes it) is missing" in result.stdout
    result = run_suite(tmp_path / "tests", require=part, suite=suite)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR


@pytest.mark.requires("native")
def test_build_tools_are_looked_for_as_a_build_does_it() -> None:
    # this Python's effexport; the tests that need native code have found both
    script = f'source "{HERE.parent}/scripts/environment.sh"; VENV="{sys.prefix}"; has_cmake && has_tool compiler'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def required_parts(
    folder: Path,
    size: str,
    *,
    uname: str,
    variables: dict[str, str] | None = None,
    browser: bool = False,
    disk: bool = False,
) -> str:
    """The parts that scripts/test_environment.sh requires on a machine with this `uname` and without nvcc."""
    stubs = f"has_tool() {{ false; }}; has_node() {{ true; }}; has_browser() {{ {str(browser).lower()}; }}"
    stubs += f"; has_small_disk() {{ {str(disk).lower()}; }}"
    script = f'source "{HERE.parent}/scripts/test_environment.sh"; {stubs}; required_parts {size}'
    (folder / "uname").write_text(f"#!/bin/sh\necho {uname}\n")
    (folder / "uname").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "EFFEXPORT_REQUIRE"}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", **(variables or {})}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


FAST = "torch,onnx,ort,openvino,transformers,foreign,native,serve,model-signing"


def test_all_that_a_machine_can_have_is_required(tmp_path: Path) -> None:
    # the wheel of tritonserver asks for a C library that this machine may not have
    script = f'source "{HERE.parent}/scripts/test_environment.sh"; can_have_triton'
    triton = ",triton" if subprocess.run(["bash", "-c", script], check=False).returncode == 0 else ""
    linux, mac = "Linux x86_64", "Darwin arm64"
    assert (
        required_parts(tmp_path, "all", uname=linux)
        == f"{FAST},rtx,ort-rtx,ray,ray-serve,transformers5,tensorrt{triton},portability"
    )
    assert required_parts(tmp_path, "all", uname=mac) == f"{FAST},ray,ray-serve,transformers5"
    assert required_parts(tmp_path, "all", uname=mac, browser=True) == f"{FAST},ray,ray-serve,transformers5,browser"
    assert required_parts(tmp_path, "all", uname=mac, disk=True) == f"{FAST},ray,ray-serve,transformers5,small-disk"


def test_the_fast_part_requires_no_slow_part(tmp_path: Path) -> None:
    assert required_parts(tmp_path, "fast", uname="Linux x86_64", browser=True) == f"{FAST},rtx,ort-rtx"
    assert required_parts(tmp_path, "fast", uname="Darwin arm64", browser=True) == FAST


@pytest.mark.parametrize("size", ["fast", "all"])
def test_the_user_may_require_other_parts(tmp_path: Path, size: str) -> None:
    given = {"EFFEXPORT_REQUIRE": "torch, onnx"}
    assert required_parts(tmp_path, size, uname="Linux x86_64", variables=given) == "torch,onnx"


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_the_script_finds_the_browsers_that_the_tests_find(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch(mode=0o755)
    # sourced with the usual PATH, which it needs
    script = f'source "{HERE.parent}/scripts/test_environment.sh"; PATH="{tmp_path}"; has_browser'
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0
    script = f'source "{HERE.parent}/scripts/test_environment.sh"; PATH="{tmp_path / "empty"}"; has_browser'
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 1
