"""The contents of a folder: bytes or a file to copy, by relative path."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from effexport.files import file_digest

Content = Mapping[str, bytes | Path]
# The server may write this folder beside model.py.
IGNORED = "__pycache__"


def digest_of_content(content: Content) -> str:
    """A checksum of names and contents."""
    digests = {
        name: file_digest(source) if isinstance(source, Path) else hashlib.sha256(source).hexdigest()
        for name, source in content.items()
    }
    return combined(digests)


def digest_of_folder(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file() and IGNORED not in path.parts)
    return combined({path.relative_to(folder).as_posix(): file_digest(path) for path in files})


def combined(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def write_content(content: Content, folder: Path) -> None:
    """Write all files and flush them to disk, so that they are complete before they are renamed into place."""
    for name, source in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, Path):
            shutil.copyfile(source, path)
        else:
            path.write_bytes(source)
        # the server may run as another user, in a container
        path.chmod(0o644)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
