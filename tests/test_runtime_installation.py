"""The wheel in a clean environment, installed as a machine needs it that only runs artifacts: without PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import runtime_commands
from package_builds import build, copy_tree
from small_builds import built_artifact
from small_specs import spec_of

ROOT = Path(__file__).parents[1]
# what only a build needs; the last three are needed by these alone
BUILD_ONLY = {"torch", "onnxscript", "networkx", "fsspec", "filelock"}
pytestmark = [pytest.mark.slow, pytest.mark.requires("torch", "ort"), pytest.mark.xdist_group("packaging")]
Installed = Callable[..., Path]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build(copy_tree(tmp_path_factory.mktemp("tree")), out, "--wheel")
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment outside the repository, with nothing in it yet."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def install(environment: Path, *requirements: str) -> None:
    command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def installed(environment: Path) -> set[str]:
    command = [environment / "bin" / "python", "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return {row["name"].lower().replace("_", "-") for row in json.loads(listed.stdout)}


@pytest.fixture(scope="module")
def runtime(environment: Path, wheel: Path) -> Path:
    """The environment with effexport[cpu]."""
    install(environment, f"effexport[cpu] @ {wheel.as_uri()}")
    return environment


@pytest.fixture(scope="module")
def artifact() -> Path:
    return built_artifact(spec_of("lsh", "encoder"))


def clean_variables() -> dict[str, str]:
    """The variables of this process but for those that lead back to the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(environment: Path, folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [str(environment / "bin" / "effexport"), *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=clean_variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_an_installation_to_run_artifacts_has_no_pytorch(runtime: Path) -> None:
    packages = installed(runtime)
    assert {"effexport", "onnxruntime", "onnx"} <= packages
    assert packages & BUILD_ONLY == set()


def test_every_command_that_needs_no_pytorch_works_there(runtime: Path, artifact: Path, tmp_path: Path) -> None:
    runtime_commands.prepare(tmp_path)
    for command, expected in runtime_commands.WORKING:
        done = run(runtime, tmp_path, runtime_commands.words(command, artifact))
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert expected in done.stdout, f"{command}\n{done.stdout}"


def test_every_command_that_needs_pytorch_names_the_extra_there(runtime: Path, artifact: Path, tmp_path: Path) -> None:
    runtime_commands.prepare(tmp_path)
    for command in runtime_commands.REFUSED:
        done = run(runtime, tmp_path, runtime_commands.words(command, artifact))
        assert done.returncode == 2, f"{command}\n{done.stdout}"
        assert runtime_commands.REMEDY in done.stdout
        assert "Traceback" not in done.stdout


def test_the_packages_that_an_image_for_triton_adds_are_enough_to_run_a_packaged_model(
    runtime: Path, artifact: Path, tmp_path: Path
) -> None:
    package = ["package", str(artifact), "--format", "triton", "--backend", "python", "-o", "repository"]
    assert run(runtime, tmp_path, package).returncode == 0
    requirements = re.findall(r"\S+==\S+", (tmp_path / "repository" / "Dockerfile").read_text(encoding="utf-8"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    install(tmp_path / "image", *requirements)
    assert installed(tmp_path / "image") & BUILD_ONLY == set()
    (model,) = (tmp_path / "repository").glob("*/1")
    code = (
        "import effexport, numpy as np; runner = effexport.load('artifact');"
        "print(runner.run({'input_ids': np.ones((1, 64), np.int64)})['last_hidden_state'].shape)"
    )
    variables = clean_variables() | {"PYTHONPATH": "effexport.zip"}
    command = [tmp_path / "image" / "bin" / "python", "-c", code]
    done = subprocess.run(command, cwd=model, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(1, 64, 32)", done.stderr


@contextmanager
def served(environment: Path, artifact: Path, folder: Path) -> Iterator[str]:
    """The URL of a server that runs until the block ends, and then must stop cleanly."""
    command = [str(environment / "bin" / "effexport"), "serve", str(artifact), "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=folder, env=clean_variables(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                line = server.stdout.readline()
                assert line, text
                text += line
            yield json.loads(text)["url"]
            server.terminate()
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()


def test_the_server_names_its_extra_and_works_with_it(
    runtime: Path, wheel: Path, artifact: Path, tmp_path: Path
) -> None:
    refused = run(runtime, tmp_path, ["serve", str(artifact)])
    assert (refused.returncode, "pip install 'effexport[serve]'" in refused.stdout) == (2, True)
    install(runtime, f"effexport[cpu,serve] @ {wheel.as_uri()}")
    assert installed(runtime) & BUILD_ONLY == set()
    body = {"inputs": [{"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "data": [67, 104, 99, 34]}]}
    with served(runtime, artifact, tmp_path) as url:
        request = urllib.request.Request(f"{url}/v2/models/{artifact.name}/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            (output,) = json.load(answer)["outputs"]
    assert output["shape"] == [1, 4, 32]
