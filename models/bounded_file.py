"""Reads text files up to a size: what describes a model is small, and what is large is something else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# config.json with the names of 20,000 classes has 2 MB.
MOST_BYTES_OF_CONFIG = 4 << 20
# An index of 100,000 weights has 9 MB, and the largest vocabularies have 40 MB.
MOST_BYTES_OF_INDEX = 32 << 20
MOST_BYTES_OF_VOCABULARY = 128 << 20


class FileTooLargeError(ValueError):
    """A file is larger than what it should hold can be."""


def bounded_bytes(path: Path, most_bytes: int) -> bytes:
    """The contents of a file. Raises FileTooLargeError, without having read all of it, and OSError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size if stat.S_ISREG(status.st_mode) else most_bytes  # a pipe has no size
        # `read` takes memory for as much as it is asked for
        data = file.read(size) if size <= most_bytes else b""
        if size > most_bytes or file.read(1):
            raise FileTooLargeError(f"it is larger than {most_bytes >> 10} KB")
    return data
