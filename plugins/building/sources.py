"""The native sources of the kernel library: which files they are, and their hash.

`operators` are those of users; ours are always part of the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from effexport.plugins.ops import OPS, Op

# where this installation keeps them; builds are remembered by it
FOLDER = Path(__file__).resolve().parents[1]

SHARED_FILES = (
    "CMakeLists.txt",
    "native/amx.h",
    "native/attention.h",
    "native/attention_slices.h",
    "native/cpu_dispatch.h",
    "native/cuda.h",
    "native/cuda_driver.cc",
    "native/cuda_driver.h",
    "native/cuda_host.h",
    "native/element_types.h",
    "native/instruction_sets.h",
    "native/linear.h",
    "native/linear_ort.h",
    "native/linear_vectors.h",
    "native/online_softmax.h",
    "native/online_softmax_vectors.h",
    "native/ort_library.cc",
    "native/ort_op.h",
    "native/products.h",
    "native/ptx.h",
    "native/simd.h",
    "native/split_halves.h",
    "native/tile.h",
    "native/vector_elements.h",
    "native/workspace.h",
)
NATIVE_SUFFIXES = (".h", ".cc", ".cu")
FILES_PER_OP, CUDA_FILE = ("kernel.h", "kernel_cpu.cc", "ort.cc"), "kernel_cuda.cu"


def required_sources() -> list[str]:
    """The files without which nothing compiles, as paths below FOLDER."""
    return [
        *SHARED_FILES,
        *(f"{op.torch_name}/{name}" for op in OPS.values() for name in (*FILES_PER_OP, *[CUDA_FILE] * op.cuda)),
    ]


def all_sources() -> list[str]:
    """The required files, and whatever other headers an operator keeps beside its kernels."""
    headers = (path for op in OPS.values() for path in (FOLDER / op.torch_name).glob("*.h"))
    return sorted({*required_sources(), *(path.relative_to(FOLDER).as_posix() for path in headers)})


def missing_sources() -> list[str]:
    """The required files that this installation lacks: none, unless it is damaged."""
    return [name for name in required_sources() if not (FOLDER / name).is_file()]


def include_folder(op: Op) -> Path:
    """The folder below which the operator's sources name each other."""
    return op.user_folder.parent if op.package else FOLDER


def source_hash(operators: Iterable[Op] = ()) -> str:
    """SHA-256 over names and contents. A missing file is hashed as missing, so this never raises."""
    digest = hashlib.sha256()
    files = [(name, FOLDER / name) for name in all_sources()]
    for op in operators:
        own = sorted(path for path in op.user_folder.iterdir() if path.suffix in NATIVE_SUFFIXES)
        files += [(f"{op.torch_name}/{path.name}", path) for path in own]
    for name, path in files:
        content = path.read_bytes() if path.is_file() else None
        digest.update(f"{name}\0{-1 if content is None else len(content)}\0".encode())
        digest.update(content or b"")
    return digest.hexdigest()
