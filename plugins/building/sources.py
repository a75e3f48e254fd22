"""The native sources of the kernel library: which files they are, and their hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

# where this installation keeps them; builds are remembered by it
FOLDER = Path(__file__).resolve().parents[1]

# the same files are listed as package data in pyproject.toml; a test compares both with what is on disk
SOURCES: tuple[str, ...] = (
    "CMakeLists.txt",
    "native/cpu_dispatch.h",
    "native/element_types.h",
    "native/instruction_sets.h",
    "native/ort_library.cc",
    "native/ort_op.h",
    "native/simd.h",
    "aft_simple_attention/kernel.h",
    "aft_simple_attention/kernel_cpu.cc",
    "aft_simple_attention/kernel_cuda.cu",
    "aft_simple_attention/ort.cc",
    "aft_simple_attention/vectors.h",
    "iterative_pinv/kernel.h",
    "iterative_pinv/kernel_cpu.cc",
    "iterative_pinv/kernel_cuda.cu",
    "iterative_pinv/ort.cc",
    "iterative_pinv/product.h",
    "linear_attention/block.h",
    "linear_attention/kernel.h",
    "linear_attention/kernel_cpu.cc",
    "linear_attention/kernel_cuda.cu",
    "linear_attention/ort.cc",
    "lsh_attention/chunk.h",
    "lsh_attention/kernel.h",
    "lsh_attention/kernel_cpu.cc",
    "lsh_attention/kernel_cuda.cu",
    "lsh_attention/ort.cc",
    "lsh_attention/window.h",
    "lsh_sort/kernel.h",
    "lsh_sort/kernel_cpu.cc",
    "lsh_sort/kernel_cuda.cu",
    "lsh_sort/ort.cc",
    "masked_attention/kernel.h",
    "masked_attention/kernel_cpu.cc",
    "masked_attention/kernel_cuda.cu",
    "masked_attention/ort.cc",
    "masked_attention/tiles.h",
    "segment_means/kernel.h",
    "segment_means/kernel_cpu.cc",
    "segment_means/kernel_cuda.cu",
    "segment_means/ort.cc",
    "segment_means/rows.h",
    "sequence_conv/kernel.h",
    "sequence_conv/kernel_cpu.cc",
    "sequence_conv/kernel_cuda.cu",
    "sequence_conv/ort.cc",
    "sequence_conv/rows.h",
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
