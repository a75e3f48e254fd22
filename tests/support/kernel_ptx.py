"""PTX of all kernels as TensorRT plugins get it, compiled once by each compiler, and the resources that ptxas finds."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

from cuda_kernels import run
from gpu import compiled
from gpu.compiled import Usage, parse_usage
from kept import FOLDER, ROOT, digest_of, kept

from effexport.plugins.building import ptx, sources
from effexport.plugins.building.toolchain import find_nvcc
from effexport.plugins.ops import Op

RECORD = ROOT / "tests" / "plugins" / "kernel_usages.json"
NVRTC_PYTHON = ROOT / ".venv-tensorrt" / "11" / "bin" / "python"
# EFFEXPORT_CACHE_DIR where NVRTC compiles, so that each kernel is compiled once for all tests
NVRTC_CACHE = FOLDER / "nvrtc"
BY_NVRTC = """
import sys
from effexport.plugins.building import ptx
from effexport.plugins.ops import OPS
ptx.choose_nvcc = lambda: None
print(ptx.ptx_from_source(OPS[sys.argv[1]], int(sys.argv[2])))
"""


@cache
def ptx_by_nvcc(op: Op, architecture: int) -> str:
    compiler = ptx.find_ptx_compiler()
    assert compiler.identity[0] == "nvcc"

    def make(folder: Path) -> None:
        text = compiler.compile(sources.FOLDER / op.cuda_source, architecture)
        (folder / "kernel.ptx").write_text(text, encoding="utf-8")

    decided_by = [*compiler.identity, str(architecture), Path(ptx.__file__), *sources_of(op)]
    folder = kept(f"ptx/nvcc/{op.torch_name}_{architecture}", decided_by, make)
    return (folder / "kernel.ptx").read_text(encoding="utf-8")


@cache
def ptx_by_nvrtc(op: Op, architecture: int) -> str:
    """In an environment of scripts/conformance.sh, where there is nothing more of `effexport` than its plugins."""
    with tempfile.TemporaryDirectory() as folder:
        command = [NVRTC_PYTHON, "-c", BY_NVRTC, op.onnx_name, str(architecture)]
        environment = plugins_alone(Path(folder), NVRTC_CACHE)
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plugins_alone(folder: Path, cache: Path) -> dict[str, str]:
    """The environment of a process that finds no more of `effexport` than its plugins, by links in `folder`."""
    package = folder / "effexport"
    package.mkdir(exist_ok=True)
    for target in (ROOT / "exporter" / "__init__.py", ROOT / "exporter" / "base", ROOT / "plugins"):
        if not (link := package / target.name).is_symlink():
            link.symlink_to(target)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("EFFEXPORT_", "PYTHON"))},
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "EFFEXPORT_CACHE_DIR": str(cache),
    }


def sources_of(op: Op) -> list[Path]:
    return [sources.FOLDER / source for source in ptx.kernel_sources(op)]


def kept_usages(ops: Sequence[Op], architectures: Sequence[int], folder: object = None) -> dict[tuple[str, int], Usage]:
    """`compile_kernels` of scripts/gpu, which compiles each kernel once for every test.

    What nvcc said of these sources is in RECORD, so kernels are compiled only if they, nvcc or the way of compiling
    have changed. EFFEXPORT_RECORD=1 writes it anew.
    """
    return {key: usage for op in ops for sm in architectures for key, usage in _usages(op, sm).items()}


@cache
def _usages(op: Op, architecture: int) -> dict[tuple[str, int], Usage]:
    name, digest = f"{op.torch_name} for SM {architecture}", usages_digest(op)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if record.get(name, {}).get("digest") == digest:
        rows = record[name]["usages"]
    else:
        rows = _compiled_usages(op, architecture, digest)
        if os.environ.get("EFFEXPORT_RECORD"):
            record[name] = {"digest": digest, "usages": rows}
            lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(record.items())]
            RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return {(entry, architecture): Usage(*fields) for entry, *fields in rows}


def usages_digest(op: Op) -> str:
    """Of nvcc, of the functions that call it and read its output, and of the kernel's sources."""
    counting = (compiled.machine_code, compiled.Instruction, compiled.loops_of, compiled.counts_of)
    way = (compiled.compile_kernels, compiled.parse_usage, *counting, Usage)
    sources = [f"{path.relative_to(ROOT)}\n{path.read_text(encoding='utf-8')}" for path in sources_of(op)]
    return digest_of(
        [
            run(find_nvcc(), "--version"),
            repr(compiled.USAGE),
            repr((compiled.PIPES, compiled.GRID_CONTROL, compiled.GLOBAL_ACCESSES)),
            *map(inspect.getsource, way),
            *sources,
        ]
    )


def _compiled_usages(op: Op, architecture: int, digest: str) -> list[list[object]]:
    def make(folder: Path) -> None:
        found = compiled.compile_kernels([op], [architecture], folder)
        rows = [[entry, *astuple(usage)] for (entry, _), usage in sorted(found.items())]
        (folder / "usages.json").write_text(json.dumps(rows), encoding="utf-8")

    folder = kept(f"cubin/{op.torch_name}_{architecture}", [digest], make)
    rows: list[list[object]] = json.loads((folder / "usages.json").read_text(encoding="utf-8"))
    return rows


def entries_of(text: str) -> dict[str, list[str]]:
    """The types of the parameters of every entry."""
    entries = re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", text)
    return {entry: re.findall(r"\.param \.(\w+) ", parameters) for entry, parameters in entries}


def bodies_of(text: str) -> dict[str, str]:
    """The text after each entry, up to the next one."""
    parts = re.split(r"\.visible \.entry (\w+)\(", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def assembled(text: str, sm: int, folder: Path) -> dict[str, Usage]:
    """Resources of every entry on a GPU. ptxas must have no warnings."""
    (folder / "kernel.ptx").write_text(text, encoding="utf-8")
    ptxas = find_nvcc().resolve().parent / "ptxas"
    options = (f"-arch=sm_{sm}", "--warning-as-error", "-v", "-o", folder / "kernel.cubin")
    return {entry: usage for (entry, _), usage in parse_usage(run(ptxas, *options, folder / "kernel.ptx")).items()}
