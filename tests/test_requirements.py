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
    assert "transformers is not installed" in result.stdout


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
