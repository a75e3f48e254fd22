"""Imports go one way, exporter → models → plugins; frameworks load late; no file names a host or a path."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER_OF_PACKAGE = {"effexport": "exporter", "effexport.models": "models", "effexport.plugins": "plugins"}
HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "onnx_ir",
    "tensorrt",
    "tensorrt_rtx",
    "transformers",
    "numpy",
)
RUNTIMES = {"onnx", "onnxruntime", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "transformers"}
NOT_OURS = {".git", ".venv", ".venv-tensorrt", ".venv-triton", "artifacts", "build", "dist", "__pycache__"}


def tree_files() -> Iterator[Path]:
    """Every file of the repository that is not a build output, a cache or an environment."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in NOT_OURS and not name.endswith((".egg-info", "_cache")) and name != ".hypothesis"
        ]
        # in a worktree of git, .git is a file
        yield from (Path(folder, name) for name in names if name != ".git")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports of a module, the lazy ones and strings like "effexport.x.y" too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"effexport(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value)


def package_of(name: str) -> str | None:
    """Which of our packages a dotted name belongs to; None for everything foreign."""
    parts = name.split(".")
    if parts[0] != "effexport":
        return None
    longer = ".".join(parts[:2])
    return longer if longer in FOLDER_OF_PACKAGE else "effexport"


def violations(path: Path, tree: ast.AST) -> list[str]:
    """Imports of a file that the direction exporter → models → plugins forbids."""
    folder = relative(path).split("/")[0]
    allowed = {
        "exporter": {"effexport", "effexport.models", "effexport.plugins"},
        "models": {"effexport.models", "effexport.plugins"},
        "plugins": {"effexport.plugins"},
    }.get(folder, set(FOLDER_OF_PACKAGE))
    found = []
    for line, name in imports(tree):
        top = name.split(".")[0]
        package = package_of(name)
        if top in FOLDER_OF_PACKAGE.values():
            found.append(f"{relative(path)}:{line}: {name}: the folder {top}/ is no package; import effexport")
        elif package is not None and package not in allowed:
            found.append(f"{relative(path)}:{line}: {folder}/ must not import {name}")
        elif folder == "models" and top in RUNTIMES:
            found.append(f"{relative(path)}:{line}: models/ must not know {top}")
    return found


def test_imports_go_one_way() -> None:
    files = python_files("exporter", "models", "plugins", "tests", "scripts")
    assert [found for path in files for found in violations(path, ast.parse(path.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("models", "from effexport.spec import BuildSpec"),
        ("models", "from effexport import artifact"),
        ("models", "import onnx"),
        ("models", "def f():\n    import onnxruntime.capi"),
        ("plugins", "from effexport.models import attention_from_spec"),
        ("plugins", "import effexport.errors"),
        ("plugins", "import importlib\nimportlib.import_module('effexport.models.lsh')"),
        ("exporter", "from models import spec"),
        ("tests", "import plugins.lsh_sort.op"),
    ],
)
def test_a_forbidden_import_is_found(folder: str, source: str) -> None:
    assert len(violations(ROOT / folder / "planted.py", ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("exporter", "from effexport.models.spec import AttentionSpec\nimport onnx"),
        ("models", "from effexport.plugins.lsh_sort.op import lsh_sort\nimport torch"),
        ("plugins", "import onnx\nfrom effexport.plugins import DOMAIN"),
    ],
)
def test_an_allowed_import_is_not_reported(folder: str, source: str) -> None:
    assert violations(ROOT / folder / "planted.py", ast.parse(source)) == []


def loaded_by(statement: str) -> set[str]:
    """Which heavy modules are loaded in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "effexport",
        "effexport.cli",
        "effexport.spec",
        "effexport.errors",
        "effexport.models",
        "effexport.models.spec",
        "effexport.plugins",
    ],
)
def test_importing_what_the_command_line_needs_loads_no_framework(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_the_help_page_loads_no_framework() -> None:
    show_help = "from effexport.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_by(show_help) == set()


@pytest.mark.requires("torch")
def test_models_with_custom_operators_load_no_onnx() -> None:
    imports = "from effexport.models import attention_from_spec; from effexport.models.spec import attention_spec"
    layers = "[attention_from_spec(attention_spec(variant)) for variant in ('nystrom', 'lsh')]"
    assert loaded_by(f"{imports}; {layers}") & RUNTIMES == set()


def test_no_file_names_a_registry_host_or_a_path_of_a_machine() -> None:
    # put together here, so that this file passes its own test
    hosts = [".".join(words) for words in (("pypi", "org"), ("pythonhosted", "org"), ("debian", "org"))]
    hosts += [
        ".".join(("registry", "npmjs")),
        ".".join(("download", "pytorch")),
        ".".join(("pypi", "nvidia")),
    ]
    paths = [f"/{name}/" for name in ("work", "root")]
    forbidden = re.compile(
        "|".join(map(re.escape, hosts)) + "|" + "|".join(rf"(?<![\w.)}}]){re.escape(p)}" for p in paths)
    )
    found = []
    for path in tree_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
            if forbidden.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    assert found == []
