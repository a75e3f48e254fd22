"""Every class, method and constant of TensorRT that our code uses exists: in the real bindings of 11.4 and 10.16, and
in TensorRT-RTX. typings/tensorrt.pyi says what is used, and mypy lets the code use nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorrt_stub import declared

from effexport.tensorrt.spec import RTX_COMPUTE_CAPABILITIES

ROOT = Path(__file__).resolve().parents[3]
CHECKER = ROOT / "tests" / "plugins" / "tensorrt" / "api_surface.py"
ENVIRONMENTS = ROOT / ".venv-tensorrt"


# What only the other product has, as "Class" or "Class.member".
NOT_IN_TRT = {
    "ComputeCapability",
    "EngineValidity",
    "EngineInvalidityDiagnostics",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "CudaGraphStrategy",
    "IRuntimeConfig.cuda_graph_strategy",
    "Runtime.engine_header_size",
    "Runtime.get_engine_validity",
}
NOT_IN_RTX = {"NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS"}


def used_in(product: str) -> dict[str, list[str]]:
    """The used names of one product: all except those that only the other one has."""
    absent = {"tensorrt": NOT_IN_TRT, "tensorrt_rtx": NOT_IN_RTX}[product]
    members = {}
    for path, names in declared().items():
        if path in absent:
            continue
        members[path] = [name for name in names if f"{path}.{name}".lstrip(".") not in absent]
    return members


def answer_of(python: str | Path, module: str, members: dict[str, list[str]], library_path: str = "") -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if library_path:
        variables["LD_LIBRARY_PATH"] = library_path
    done = subprocess.run(
        [python, CHECKER],
        input=json.dumps({"module": module, "members": members}),
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def real_tensorrt(major: str, members: dict[str, list[str]]) -> dict[str, Any]:
    environment = ENVIRONMENTS / major
    library_path = (environment / "library-path").read_text(encoding="utf-8").strip()
    return answer_of(environment / "bin" / "python", "tensorrt", members, library_path)


def test_the_stub_covers_what_is_known_to_be_used() -> None:
    found = declared()
    assert {"", "Builder", "OnnxParser", "ICudaEngine", "IExecutionContext", "BuilderFlag"} <= found.keys()
    assert "create_network" in found["Builder"]
    assert "TF32" in found["BuilderFlag"]
    assert sum(map(len, found.values())) > 100


@pytest.mark.requires("tensorrt")
@pytest.mark.parametrize("major", ["11", "10"])
def test_the_real_tensorrt_has_all_that_is_used(major: str) -> None:
    members = used_in("tensorrt")
    answer = real_tensorrt(major, members)
    assert answer["version"].startswith(f"{major}.")
    assert answer["missing"] == []
    assert answer["checked"] == sum(map(len, members.values()))


@pytest.mark.requires("tensorrt")
def test_what_is_marked_as_absent_from_tensorrt_is_absent() -> None:
    """Or a check of a name that is there would be left out."""
    everything = declared()
    missing = set(real_tensorrt("11", everything)["missing"])
    assert {name.split(".")[0] if name.split(".")[0] in NOT_IN_TRT else name for name in missing} == NOT_IN_TRT


@pytest.mark.requires("rtx")
def test_tensorrt_rtx_has_all_that_is_used() -> None:
    members = used_in("tensorrt_rtx")
    answer = answer_of(sys.executable, "tensorrt_rtx", members)
    assert answer["missing"] == []
    assert answer["checked"] == sum(map(len, members.values()))
    assert set(answer_of(sys.executable, "tensorrt_rtx", declared())["missing"]) == NOT_IN_RTX


@pytest.mark.requires("rtx")
def test_a_renamed_method_would_be_noticed() -> None:
    members = {"Builder": ["create_network", "make_network"], "NoSuchClass": ["x"]}
    assert answer_of(sys.executable, "tensorrt_rtx", members)["missing"] == ["Builder.make_network", "NoSuchClass.x"]


@pytest.mark.requires("rtx")
def test_tensorrt_rtx_names_exactly_the_gpus_that_can_be_asked_for() -> None:
    import tensorrt_rtx

    named = {name for name in tensorrt_rtx.ComputeCapability.__members__ if name.startswith("SM")}
    assert named == {f"SM{number}" for number in RTX_COMPUTE_CAPABILITIES}


def test_the_bindings_are_imported_in_one_place() -> None:
    """By `import_api`, whose answer mypy holds to the stub; other files of the package import types alone."""
    importers = set()
    for folder in ("exporter", "models"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
            for_types = {id(node) for block in blocks for node in block.body}
            for node in ast.walk(tree):
                if id(node) in for_types:
                    continue
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(module.split(".")[0] in ("tensorrt", "tensorrt_rtx") for module in modules):
                    importers.add(file.relative_to(ROOT).as_posix())
    assert importers == set()
