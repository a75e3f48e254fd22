"""CUDA kernels as functions of NumPy arrays: plugins/native/cuda_on_cpu.h runs them, in one library per operator."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
from gpu.building import shared_memory_aliases
from kept import kept_program

from effexport.plugins.building.ptx import kernel_sources
from effexport.plugins.building.toolchain import find_compiler
from effexport.plugins.ops import Op

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
NATIVE = ROOT / "tests" / "plugins" / "native"


def run(*command: str | Path, **options) -> str:
    """The output of a command. Its failure shows all of it."""
    completed = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert completed.returncode == 0, f"{' '.join(map(str, command))}\n{completed.stdout}{completed.stderr}"
    return completed.stdout + completed.stderr


INEXACT = re.compile(r"\b[\w.]+\.(?:approx|full|ftz|tf32)\b[.\w]*")


def assert_arithmetic_is_exact(ptx: str) -> None:
    """Every result is rounded once, as IEEE 754 says: no division to 2 units (`.full`), no lost subnormals (`.ftz`), no
    factors of TF32's 10 bits. 2^x is the only approximation: to 2⁻²², which contracts state. CUDA's own exponential
    function uses it too.
    """
    found = {*INEXACT.findall(ptx)} - {"ex2.approx.ftz.f32"}
    assert not found, found


SANITIZERS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(name: str, *options: str, keep_as: str = "") -> Path:
    """A program or library of emulated kernels, from native/<name>.cc, compiled when first needed.

    keep_as: another name to keep it under.
    """
    includes = [f"-I{path}" for path in (PLUGINS, NATIVE)]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    # results are compared bit by bit with NumPy's, which fuses nothing
    exact = "-ffp-contract=off"
    aliases = shared_memory_aliases() if "-shared" in options else []
    definitions = "".join(option for option in options if option.startswith("-DEFFEXPORT_EMULATED"))
    return kept_program(
        f"native/{keep_as or name}{definitions}",
        find_compiler(),
        *("-std=c++17", exact, *options, *warnings, *includes, NATIVE / f"{name}.cc", *aliases),
    )


def plugin_entries(op: Op) -> list[str]:
    """The kernels of an operator that its TensorRT plugins launch."""
    return list(dict.fromkeys(entry for plugin in op.load_trt().PLUGINS for entry in plugin.entries))


def kernel_entries(op: Op) -> list[str]:
    """Those, and the others that are declared by name, not for every element type by a macro."""
    text = (PLUGINS / op.cuda_source).read_text(encoding="utf-8")
    return list(dict.fromkeys((*plugin_entries(op), *re.findall(r"^ +(effexport_\w+)\((?=const)", text, re.MULTILINE))))


def depends_on_architecture(op: Op) -> bool:
    """False if the kernels of an operator are the same program on every GPU: only ptx.h, which defines it, names
    kArchitecture."""
    texts = (text for name, text in kernel_sources(op).items() if name != "native/ptx.h")
    return any(b"kArchitecture" in text for text in texts)


DTYPES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(ml_dtypes.bfloat16): "bfloat16"}
GUARD = 64
ALL_BLOCKS = 2**32 - 1


def guarded(shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """An array of NaN, or −1, and the larger one that it lies in."""
    size = int(np.prod(shape))
    whole = np.frombuffer(bytearray(b"\xff" * ((size + 2 * GUARD) * dtype.itemsize)), dtype)
    return whole[GUARD : GUARD + size].reshape(shape), whole


def assert_guard_is_intact(whole: np.ndarray) -> None:
    edges = np.concatenate([whole[:GUARD], whole[-GUARD:]]).view(np.uint8)
    assert (edges == 0xFF).all(), "the kernel wrote beyond its output"


def emulated_library(op: Op, *options: str) -> ctypes.CDLL:
    """native/emulated.cc with the kernels of one operator."""
    names = {"KERNEL": f'"{op.cuda_source}"', "CHECK": f'"{op.torch_name}/gpu_check.cc"', "OP": op.torch_name}
    names["ENTRIES"] = " ".join(f"ADD({entry})" for entry in kernel_entries(op))
    definitions = [f"-DEMULATED_{name}={value}" for name, value in names.items()]
    path = build("emulated", "-O2", "-fPIC", "-shared", *definitions, *options, keep_as=f"emulated/{op.torch_name}")
    return ctypes.CDLL(str(path))
