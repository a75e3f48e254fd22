"""CUDA kernels as functions of NumPy arrays: plugins/native/cuda_on_cpu.h runs them, in one library per operator."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from kept import kept_program

from effexport.plugins.building.toolchain import find_compiler

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
NATIVE = ROOT / "tests" / "plugins" / "native"

# inputs, int32 scalars, outputs: the order that TensorRT wants
PINV_PARAMETERS = ["u64", "u64", "u32", "u32", "u32", "u64"]
AFT_SIMPLE_PARAMETERS = {
    "sums": ["u64", "u64", "u64", "u32", "u32", "u32", "u32", "u64"],
    "gate": ["u64", "u64", "u32", "u32", "u32", "u64"],
}
AFT_WINDOW_PARAMETERS = {
    "sums": ["u64"] * 3 + ["u32"] * 5 + ["u64"],
    "attend": ["u64"] * 8 + ["u32"] * 8 + ["u64"],
    "causal": ["u64"] * 8 + ["u32"] * 8 + ["u64"],
}
ENTRIES = {
    **{f"effexport_iterative_pinv_{dtype}": PINV_PARAMETERS for dtype in ("float32", "float16", "bfloat16")},
    **{
        f"effexport_iterative_pinv_scratch_{dtype}": [*PINV_PARAMETERS, "u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_linear_attention_states_{dtype}": ["u64"] * 3 + ["u32"] * 7 + ["u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_linear_attention_outputs_{dtype}": ["u64"] * 2 + ["u32"] * 7 + ["f32", "u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_linear_attention_causal_outputs_{dtype}": ["u64"] * 5 + ["u32"] * 7 + ["f32", "u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    "effexport_linear_attention_combine": ["u64"] + ["u32"] * 4 + ["u64"],
    **{
        f"effexport_lsh_attention_{dtype}": ["u64"] * 5 + ["u32"] * 13 + ["u64"] * 2
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_lsh_attention_combine_{dtype}": ["u64"] * 2 + ["u32"] * 5 + ["u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_lsh_attention_prepare_{dtype}": ["u64"] * 2 + ["u32"] * 4 + ["u64"] * 2
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_lsh_hash_{dtype}": ["u64"] * 3 + ["u32"] * 10 + ["u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    "effexport_lsh_sort": ["u64", "u32", "u32", "u32", "u64", "u64"],
    **{
        f"effexport_masked_attention_{dtype}": ["u64"] * 4 + ["u32"] * 7 + ["f32", "u32", "u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_masked_attention_merge_{dtype}": ["u64"] + ["u32"] * 4 + ["u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_segment_means_{dtype}": ["u64"] * 2 + ["u32"] * 5 + ["u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{
        f"effexport_sequence_conv_{dtype}": ["u64"] * 4 + ["u32"] * 5 + ["u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    "effexport_aft_window_others": ["u64"] + ["u32"] * 4 + ["u64"],
    **{
        f"effexport_aft_window_{step}_{dtype}": types
        for step, types in AFT_WINDOW_PARAMETERS.items()
        for dtype in ("float32", "float16", "bfloat16")
    },
    "effexport_aft_simple_merge": ["u64", "u32", "u32", "u32", "u64"],
    **{
        f"effexport_aft_simple_{step}_{dtype}": types
        for step, types in AFT_SIMPLE_PARAMETERS.items()
        for dtype in ("float32", "float16", "bfloat16")
    },
}
# of one multiprocessor
REGISTERS = 65536
THREADS = {entry: 512 if "sort" in entry else 256 for entry in ENTRIES}
THREADS |= {
    f"effexport_{op}_{dtype}": 128
    for op in ("iterative_pinv", "masked_attention", "lsh_attention", "lsh_hash")
    for dtype in ("float32", "float16", "bfloat16")
}
THREADS |= {entry: 128 for entry in ENTRIES if "linear_attention" in entry and "combine" not in entry}


def run(*command: str | Path, **options) -> str:
    """What a command prints. Its failure shows all of it."""
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


def build(name: str, *options: str, sources: Sequence[Path] = ()) -> Path:
    """A program or library of emulated kernels, from native/<name>.cc and further sources, compiled when first needed.

    The headers of the toolkit, which the emulation replaces, are empty files.
    """
    includes = [f"-I{path}" for path in (PLUGINS, NATIVE, NATIVE / "no_toolkit")]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    # results are compared bit by bit with NumPy's, which fuses nothing
    exact = "-ffp-contract=off"
    files = [NATIVE / f"{name}.cc", *sources]
    definitions = "".join(option for option in options if option.startswith("-D"))
    return kept_program(
        f"native/{name}{definitions}", find_compiler(), "-std=c++17", exact, *options, *warnings, *includes, *files
    )


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


class Emulated:
    """The kernels of one operator. Outputs are poisoned before a kernel runs, and guarded."""

    op = ""

    def __init__(self, *options: str) -> None:
        self.library = ctypes.CDLL(str(build(f"emulated/{self.op}", "-O2", "-fPIC", "-shared", *options)))
        self.library.get_launch.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        self.library.set_schedule.argtypes = [ctypes.c_uint, ctypes.c_uint]

    def launch(self, before_last: int = 0) -> list[int]:
        """Grid, block and dynamic shared memory of the last launch, or of one before."""
        launch = np.zeros(3, np.int64)
        self.library.get_launch(before_last, launch.ctypes.data)
        return launch.tolist()
