"""Files that cannot be written: the one line that such an error becomes, above all on a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from effexport.base.errors import DiskError, EffexportError, UserError
from effexport.base.formatting import memory
from effexport.models.validation import SpecError

FULL, LIMIT = "the disk is full", "a file may not become so large, see ulimit -f"
# What is wrong with a disk, not with what the user has asked for.
_PROBLEMS = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: LIMIT,
    errno.EIO: "the disk has failed, Input/output error",
    errno.ESTALE: "the disk has failed, Stale file handle",
}
# What libraries say that keep no error number: those in Rust, and tempfile.
_WORDS = {os.strerror(number): problem for number, problem in _PROBLEMS.items()}
_WORDS["No usable temporary directory"] = FULL
# numpy's tofile, also in onnx_ir, which does not say why it could not write.
_WORDS_OF_NUMPY = ("problem writing element", "requested and")
# How to choose another path, for each kind.
ANOTHER_FOLDER = "choose another folder with -o"
ANOTHER_FILE = "choose another file with -o"
ANOTHER_TEMPORARY = "set TMPDIR to a folder with more room"


def disk_problem(error: BaseException) -> str:
    """The disk's problem behind an error or one of its causes; "" for any other reason."""
    one: BaseException | None = error
    # an error that blames the input says enough: its file could not be read, for example
    while one is not None and not isinstance(one, UserError | SpecError):
        if isinstance(one, OSError) and one.errno in _PROBLEMS:
            return _PROBLEMS[one.errno]
        text = str(one)
        if found := [problem for words, problem in _WORDS.items() if words in text]:
            return found[0]
        if any(words in text for words in _WORDS_OF_NUMPY):
            return LIMIT if has_limit_of_size() else FULL
        one = one.__cause__ or one.__context__
    return ""


def has_limit_of_size() -> bool:
    """True if the system limits the size of files that this process writes."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def write_error(path: Path, error: BaseException, remedy: str) -> EffexportError:
    """The error to raise for a file or folder that could not be written.

    It is a DiskError, with the space that is left now if the disk is full, or else a UserError. remedy: how to choose
    another path.
    """
    problem = disk_problem(error)
    if not problem:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return UserError(f"cannot write {path}: {reason}; {remedy}")
    if problem != FULL:
        return DiskError(f"cannot write {path}: {problem}; {remedy}")
    folder, temporary = existing_folder(path), existing_folder(Path(tempfile.gettempdir()))
    # by far, because other programs may write to a disk that holds both between the two readings
    if free_bytes(temporary) < free_bytes(folder) / 2:
        folder, remedy = temporary, ANOTHER_TEMPORARY
    room = f"{memory(free_bytes(folder))} free in {folder}"
    return DiskError(f"cannot write {path}: {FULL} ({room}); free some space, or {remedy}")


def expected_error(error: OSError) -> EffexportError | None:
    """The error to report for a system error that nobody has handled; None for a bug."""
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"the name {str(error.filename)[:80]!r}… is too long; choose a shorter one")
    try:
        check_current_folder()
    except UserError as gone:
        return gone
    problem = disk_problem(error)
    name = f" {error.filename}" if error.filename else " a file"
    return DiskError(f"cannot write{name}: {problem}; free some space, or {ANOTHER_TEMPORARY}") if problem else None


def check_current_folder() -> None:
    """Raise UserError if somebody has removed the folder in which the command was given: relative paths lead nowhere
    then, and PyTorch's oneMKL ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder does not exist any more; change to another one with cd") from None


def existing_folder(path: Path) -> Path:
    """The folder that contains a path, or would contain it."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
