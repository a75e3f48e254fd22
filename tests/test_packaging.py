"""The wheel and the sdist hold what they should: one package, all of it, and nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from package_builds import PACKAGE_OF_FOLDER, ROOT, build, copy_tree

import effexport
from effexport.base.environment import PACKAGES
from effexport.plugins.building.build import SHA256
from effexport.plugins.building.sources import all_sources
from effexport.plugins.ops import OPS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# the two builds below are made once, by one worker
pytestmark = pytest.mark.xdist_group("packaging")


def source_files() -> dict[str, bytes]:
    """Files that the wheel must hold, by their path there, with their content."""
    files = {}
    for folder, package in PACKAGE_OF_FOLDER.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = path.relative_to(ROOT / folder).as_posix()
                files[f"{package.replace('.', '/')}/{inside}"] = path.read_bytes()
    return files


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree."""
    out = tmp_path_factory.mktemp("from_tree")
    build(copy_tree(tmp_path_factory.mktemp("tree")), out, "--wheel")
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def sdist_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("from_sdist")
    build(copy_tree(tmp_path_factory.mktemp("sdist_tree")), out)
    return out


def wheel_files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_wheel_is_pure_python(wheel_path: Path) -> None:
    assert wheel_path.name == f"effexport-{effexport.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_the_wheel_puts_only_effexport_into_site_packages(wheel_path: Path) -> None:
    top = {name.split("/")[0] for name in wheel_files(wheel_path)}
    assert top == {"effexport", f"effexport-{effexport.__version__}.dist-info"}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_folders_unchanged(wheel_path: Path) -> None:
    held = {name: data for name, data in wheel_files(wheel_path).items() if name.startswith("effexport/")}
    expected = source_files()
    assert sorted(held) == sorted(expected)
    assert [name for name in held if held[name] != expected[name]] == []


@pytest.mark.slow
def test_the_wheel_holds_types_contracts_and_licence(wheel_path: Path) -> None:
    names = set(wheel_files(wheel_path))
    assert "effexport/py.typed" in names
    for op in OPS.values():
        assert f"effexport/plugins/{op.torch_name}/README.md" in names
    assert f"effexport-{effexport.__version__}.dist-info/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_wheel_holds_the_native_sources(wheel_path: Path) -> None:
    assert {f"effexport/plugins/{name}" for name in all_sources()} <= set(wheel_files(wheel_path))


SCRIPT = """
import effexport
effexport.build(variant="lsh", precision="fp16", output="x")
effexport.build(varaint="lsh")
effexport.build(variant="lsh", precision="fp61")
effexport.verify("x", runtime=3)
reveal_type(effexport.build())
"""


@pytest.mark.slow
def test_a_type_checker_follows_an_editable_install(tmp_path: Path) -> None:
    """It refuses arguments that are not there, and values that cannot be."""
    made = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", made], cwd=copy_tree(tmp_path / "tree"), check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site_packages,) = tmp_path.glob("venv/lib/*/site-packages")
    zipfile.ZipFile(wheel).extractall(site_packages)
    (tmp_path / "script.py").write_text(SCRIPT)
    checker = [sys.executable, "-m", "mypy", "--config-file=", "--python-executable", tmp_path / "venv/bin/python"]
    done = subprocess.run([*checker, "script.py"], capture_output=True, text=True, cwd=tmp_path)
    for line in (
        'script.py:4: error: Unexpected keyword argument "varaint" for "build"; did you mean "variant"?',
        'script.py:5: error: Argument "precision" to "build" has incompatible type "Literal[\'fp61\']"',
        'script.py:6: error: Argument "runtime" to "verify" has incompatible type "int"; expected "str"',
        'script.py:7: note: Revealed type is "effexport.api.BuildResult"',
    ):
        assert line in done.stdout
    assert "script.py:3:" not in done.stdout


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel_path: Path, sdist_folder: Path) -> None:
    rebuilt = wheel_files(sdist_folder / wheel_path.name)
    assert rebuilt == wheel_files(wheel_path)


@pytest.mark.slow
def test_the_sdist_holds_the_folders_under_their_own_names(sdist_folder: Path) -> None:
    with tarfile.open(sdist_folder / f"effexport-{effexport.__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in (
        "pyproject.toml",
        "LICENSE",
        "exporter/__init__.py",
        "models/attention_spec.py",
        "setup.py",
        "plugins/__init__.py",
    ):
        assert name in names


def test_every_folder_with_python_files_is_a_package() -> None:
    """setup.py finds packages, and no other folders."""
    folders = {path.parent for folder in PACKAGE_OF_FOLDER for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("effexport") == effexport.__version__ == PROJECT["project"]["version"]
    (kernels,) = PROJECT["project"]["optional-dependencies"]["prebuilt"]
    assert kernels.startswith(f"effexport-kernels=={effexport.__version__};")


def name_of(requirement: str) -> str:
    """The distribution that a requirement names, in the spelling of package indexes."""
    return re.split(r"[=<>\[;]", requirement)[0].strip().lower().replace("_", "-")


# Imported packages whose distribution has another name, or which the program at hand brings: Triton's Python backend,
# a stub of type checkers, and transformers where the user compares with it.
DISTRIBUTIONS = {"cuda": "cuda-bindings", "google": "protobuf"}
BUILD_ONLY = {"torch", "onnxscript"}
NOT_OURS_TO_INSTALL = {"_typeshed", "transformers", "triton_python_backend_utils"}


def test_every_imported_package_is_declared() -> None:
    imported = set()
    for folder in PACKAGE_OF_FOLDER:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - NOT_OURS_TO_INSTALL - {"effexport"}
    project = PROJECT["project"]
    extras = (requirement for group in project["optional-dependencies"].values() for requirement in group)
    declared = {name_of(requirement) for requirement in (*project["dependencies"], *extras)}
    assert {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in foreign} <= declared


def test_pytorch_and_the_onnx_exporter_are_needed_to_build_only() -> None:
    project = PROJECT["project"]
    assert {name_of(requirement) for requirement in project["optional-dependencies"]["build"]} == BUILD_ONLY
    assert {name_of(requirement) for requirement in project["dependencies"]} & BUILD_ONLY == set()
    in_doctor = {package.module for package in PACKAGES if package.extra == "build"}
    assert in_doctor == BUILD_ONLY
    assert all(package.optional for package in PACKAGES if package.extra == "build")


def test_constraints_cover_every_direct_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line) for line in lines if "==" in line and not line.startswith("#")}
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    required = {name_of(r) for r in project["dependencies"] + extras["cpu"] + extras["test"] + extras["dev"]}
    required |= {name_of(r) for r in extras["build"] + extras["kernels"] + extras["serve"]}
    required |= {name_of(r) for r in extras["serve-ray"]} - {"effexport"}
    assert required - pinned == set()


# What would fetch something by itself, past pip, npm and apt, which check what they fetch.
DOWNLOADERS = re.compile(r"\b(curl|wget|aria2c|urlopen|urlretrieve|httpx|git clone)\b|\brequests\.(get|post)\b")
# Talk to the user's own server, or print a command for one.
NO_DOWNLOADS = {"exporter/serving/http/endpoints.py", "exporter/serving/triton/package.py"}


def test_nothing_is_downloaded_by_the_set_up_but_from_a_package_index_or_with_a_checksum() -> None:
    scripts = [ROOT / ".ci" / "run", *(ROOT / "scripts").rglob("*.sh")]
    code = [path for folder in ("scripts", "exporter", "models", "plugins") for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (*scripts, *code)
        if DOWNLOADERS.search(path.read_text(encoding="utf-8"))
    }
    assert found - NO_DOWNLOADS == set()
    # the one file that apt fetches for us from another release than the machine's own
    assert SHA256
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in SHA256.values())


def test_every_package_that_a_set_up_script_asks_for_has_one_version() -> None:
    for path in sorted((ROOT / "scripts").rglob("*requirements*.txt")) + sorted(
        (ROOT / "scripts" / "portability" / "requirements").glob("*.txt")
    ):
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        assert [line for line in lines if line and not re.search(r"==\d|^-", line)] == [], path
    web = json.loads((ROOT / "scripts" / "portability" / "requirements" / "package.json").read_text(encoding="utf-8"))
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in web["dependencies"].values())
