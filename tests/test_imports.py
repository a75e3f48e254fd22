"""Imports go one way; frameworks load late; no file names a host or a path of a machine."""

from __future__ import annotations

import ast
import itertools
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
    "sigstore",
)
RUNTIMES = {"onnx", "onnxruntime", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "transformers"}
NOT_OURS = {".venv", ".git", "artifacts", "share", "build", "dist", "__pycache__"}


def tree_files() -> Iterator[Path]:
    """Every file of the repository that is not a build output, a cache or an environment."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in NOT_OURS
            and not name.endswith((".egg-info", "_cache"))
            and name != ".hypothesis"
            and not name.startswith(".venv-")
        ]
        # in a worktree of git, .git is a file
        yield from (Path(folder, name) for name in names if name != ".git")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# From the top of the story to its foundations: a part imports its own row and the rows below it.
ROWS: tuple[tuple[str, ...], ...] = (
    ("__main__", "cli"),
    ("__init__", "api", "pipeline", "bench", "serving", "hf"),
    ("report",),
    ("options",),
    ("tasks",),
    ("proof",),
    ("runners", "tensorrt"),
    ("signature",),
    ("keyless",),
    ("artifact",),
    ("export",),
    ("quantize",),
    ("base", "render"),
    ("models",),
    ("plugins",),
)
ROW_OF_PART = {part: row for row, parts in enumerate(ROWS) for part in parts}


def module_of(path: Path) -> str:
    """exporter/proof/cases.py → effexport.proof.cases; a package has the name of its folder."""
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    package = next(package for package, name in FOLDER_OF_PACKAGE.items() if name == folder)
    return ".".join([package, *(part for part in parts if part != "__init__")])


MODULES = {module_of(path): path for path in python_files("exporter", "models", "plugins")}


def part_of(module: str) -> str:
    """effexport.proof.cases → proof; effexport itself → __init__."""
    return [*module.split("."), "__init__"][1]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports of a module, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def named_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of the strings that name one of our modules, to import it or to start it as a process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in MODULES.keys() - FOLDER_OF_PACKAGE.keys():
            yield node.lineno, node.value


def package_of(name: str) -> str | None:
    """The package of ours that a dotted name belongs to; None for everything foreign."""
    parts = name.split(".")
    if parts[0] != "effexport":
        return None
    longer = ".".join(parts[:2])
    return longer if longer in FOLDER_OF_PACKAGE else "effexport"


def violations(path: Path, tree: ast.AST) -> list[str]:
    """Imports of a file that the order of the folders forbids."""
    folder = relative(path).split("/")[0]
    found = []
    for line, name in (*imports(tree), *named_modules(tree)):
        top = name.split(".")[0]
        if top in FOLDER_OF_PACKAGE.values():
            found.append(f"{relative(path)}:{line}: {name}: {top}/ is not a package; import effexport")
        elif folder == "models" and top in RUNTIMES:
            found.append(f"{relative(path)}:{line}: models/ must not know {top}")
        elif package_of(name) is not None and folder in FOLDER_OF_PACKAGE.values():
            own, other = part_of(module_of(path)), part_of(name)
            # a name that effexport/__init__.py defines, such as effexport.load
            other = other if other in ROW_OF_PART else "__init__"
            if ROW_OF_PART[other] < ROW_OF_PART[own]:
                found.append(f"{relative(path)}:{line}: {own} must not import {name}, which is above it")
    return found


def test_imports_go_one_way() -> None:
    found = []
    for path in python_files("exporter", "models", "plugins", "tests", "scripts"):
        found += violations(path, ast.parse(path.read_text(encoding="utf-8")))
    assert found == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/planted.py", "from effexport.base.spec import BuildSpec"),
        ("models/planted.py", "from effexport import artifact"),
        ("models/planted.py", "import onnx"),
        ("models/planted.py", "def f():\n    import onnxruntime.capi"),
        ("plugins/planted.py", "from effexport.models import attention_from_spec"),
        ("plugins/planted.py", "import effexport.base.errors"),
        ("plugins/planted.py", "import importlib\nimportlib.import_module('effexport.models.variants.lsh.layer')"),
        ("exporter/proof/planted.py", "from models import spec"),
        ("exporter/proof/planted.py", "from effexport.report.report import Report"),
        ("exporter/export/planted.py", "def f():\n    from effexport.proof import cases"),
        ("exporter/tensorrt/planted.py", "from effexport import load"),
        ("exporter/artifact.py", "from effexport.tensorrt.sidecar import EngineInfo"),
        ("tests/planted.py", "import plugins.lsh_sort.op"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(violations(ROOT / file, ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("exporter/export/planted.py", "from effexport.models.attention_spec import AttentionSpec\nimport onnx"),
        ("exporter/cli/planted.py", "from effexport.pipeline.build import artifact_from_spec"),
        ("models/planted.py", "from effexport.plugins.lsh_sort.op import lsh_sort\nimport torch"),
        ("plugins/planted.py", "import onnx\nfrom effexport.plugins import DOMAIN"),
    ],
)
def test_an_allowed_import_is_not_reported(file: str, source: str) -> None:
    assert violations(ROOT / file, ast.parse(source)) == []


def loaded_by(statement: str) -> set[str]:
    """Heavy modules that a statement loads in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "effexport",
        "effexport.cli.main",
        "effexport.base.spec",
        "effexport.base.errors",
        "effexport.models",
        "effexport.models.variants",
        "effexport.plugins",
    ],
)
def test_importing_what_the_command_line_needs_loads_no_framework(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_the_help_page_loads_no_framework() -> None:
    show_help = "from effexport.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_by(show_help) == set()


def test_calls_that_prove_operators_need_no_pytorch() -> None:
    assert loaded_by("from effexport.plugins import OPS; [op.load_calls() for op in OPS.values()]") == {"numpy"}


@pytest.mark.requires("torch")
def test_models_with_custom_operators_load_no_onnx() -> None:
    imports = (
        "from effexport.models import attention_from_spec; from effexport.models.attention_spec import attention_spec"
    )
    layers = "[attention_from_spec(attention_spec(variant)) for variant in ('nystrom', 'lsh')]"
    assert loaded_by(f"{imports}; {layers}") & RUNTIMES == set()


def started_pythons(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of every `sys.executable, X`, and X."""
    for node in ast.walk(tree):
        items = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.List | ast.Tuple) else []
        for program, argument in itertools.pairwise(items):
            if ast.unparse(program) == "sys.executable":
                yield node.lineno, ast.unparse(argument)


def test_every_python_that_we_start_imports_nothing_from_the_current_folder() -> None:
    """With -m and -c, a folder `triton` there would pass for the package that PyTorch looks for. Scripts start with the
    folder of the script instead."""
    found = {
        f"{relative(path)}:{line}": argument
        for path in python_files("exporter", "models", "plugins", "scripts")
        for line, argument in started_pythons(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(found) >= 4
    assert not {place for place, argument in found.items() if argument != "'-P'" and not argument.startswith("str(")}


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
