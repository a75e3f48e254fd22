"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from triton_server import ENVIRONMENT, TritonServer, environment

from effexport.build import artifact_from_spec
from effexport.cli import main
from effexport.spec import build_spec_from_options

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native")
README = Path(__file__).parents[1] / "README.md"
PORT = 8000


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_python_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64}
    for options in ({"variant": "lsh"}, {"variant": "linear", "causal": True}):
        artifact_from_spec(build_spec_from_options(small | options, None), Path("artifacts") / options["variant"])
    # what asks a server is run by the test below
    examples = [example for example in blocks("python") if "tritonclient" not in example]
    assert len(examples) == 5
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert names["out"].shape == (2, 1000, 256)
    assert names["hidden"].shape == (1, 9, 32)
    assert [value.name for value in names["session"].get_inputs()] == ["input_ids", "attention_mask"]


@pytest.mark.requires("triton")
@pytest.mark.xdist_group("triton")
def test_the_serving_example_packages_an_artifact_and_gets_its_answers_from_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = build_spec_from_options({"variant": "lsh", "dim": 32, "heads": 2, "layers": 1, "seq_len": 64}, None)
    artifact_from_spec(spec, Path("artifacts/lsh"))
    shell = next(block for block in blocks("sh") if "effexport package" in block)
    commands = [line.split("  #")[0] for line in shell.replace("\\\n", "").splitlines()]
    (package,) = (line for line in commands if line.startswith("effexport package"))
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(package)[1:])
    assert stop.value.code == 0
    (curl,) = (line for line in commands if line.startswith("curl"))
    (client,) = (block for block in blocks("python") if "tritonclient" in block)
    with TritonServer(Path("triton"), tmp_path / "log", ["lsh"]) as server:

        def here(text: str) -> str:
            return text.replace(f"localhost:{PORT}", f"127.0.0.1:{server.http}")

        answer = subprocess.run(shlex.split(here(curl)), capture_output=True, text=True, check=True, timeout=60)
        assert '"shape":[1,4,32]' in answer.stdout
        command = [str(ENVIRONMENT / "bin" / "python"), "-c", here(client)]
        said = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
        assert said.returncode == 0, said.stderr
        assert said.stdout == "(1, 4, 32)\n"
