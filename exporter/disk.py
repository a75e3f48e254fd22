"""Files that cannot be written: the one line that such an error becomes, above all on a full disk."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from effexport.errors import DiskFullError, EffexportError, UserError
from effexport.units import memory

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What libraries say that keep no error number: numpy's tofile (also in onnx_ir), safetensors, tempfile.
_WORDS = ("No space left on device", "problem writing element", "requested and", "No usable temporary directory")
# How to choose another path, for each kind.
ANOTHER_FOLDER = "choose another folder with -o"
ANOTHER_FILE = "choose another file with -o"
ANOTHER_TEMPORARY = "set TMPDIR to a folder with more room"


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that a disk or a quota is exhausted."""
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, OSError) and one.errno in _FULL:
            return True
        if any(words in str(one) for words in _WORDS):
            return True
        one = one.__cause__ or one.__context__
    return False


def write_error(path: Path, error: BaseException, remedy: str) -> EffexportError:
    """The error to raise for a file or folder that could not be written.

    It is a DiskFullError with the space that is left now, or else a UserError. remedy: how to choose another path.
    """
    if not is_disk_full(error):
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return UserError(f"cannot write {path}: {reason}; {remedy}")
    folder, temporary = existing_folder(path), existing_folder(Path(tempfile.gettempdir()))
    # by far, because other programs may write to a disk that holds both between the two readings
    if free_bytes(temporary) < free_bytes(folder) / 2:
        folder, remedy = temporary, ANOTHER_TEMPORARY
    room = f"{memory(free_bytes(folder))} free in {folder}"
    return DiskFullError(f"cannot write {path}: the disk is full ({room}); free some space, or {remedy}")


def existing_folder(path: Path) -> Path:
    """The folder that contains a path, or would contain it."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
