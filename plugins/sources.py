"""The native sources of the kernel library: which files they are, and their hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

# where this installation keeps them; builds are remembered by it
FOLDER = Path(__file__).resolve().parent

# the same files are listed as package data in pyproject.toml; a test compares both with what is on disk
SOURCES: tuple[str, ...] = (
    "CMakeLists.txt",
    "element_types.h",
    "ort_library.cc",
    "ort_op.h",
    "iterative_pinv/kernel.h",
    "iterative_pinv/kernel_cpu.cc",
    "iterative_pinv/kernel_cuda.cu",
    "iterative_pinv/ort.cc",
    "iterative_pinv/product.h",
    "lsh_sort/kernel.h",
    "lsh_sort/kernel_cpu.cc",
    "lsh_sort/kernel_cuda.cu",
    "lsh_sort/ort.cc",
)


def missing_sources() -> list[str]:
    """The sources that this installation lacks: none, unless it is damaged."""
    return [name for name in SOURCES if not (FOLDER / name).is_file()]


def source_hash() -> str:
    """SHA-256 over names and contents. A missing file counts as such, so that asking is never an error."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = FOLDER / name
        content = path.read_bytes() if path.is_file() else None
        digest.update(f"{name}\0{-1 if content is None else len(content)}\0".encode())
        digest.update(content or b"")
    return digest.hexdigest()
