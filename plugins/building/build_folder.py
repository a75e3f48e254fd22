"""The folder in which builds are made: its lock, leftovers of killed builds, and publishing a build."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from effexport.plugins.building.library import LIBRARY_NAME, RECORD_NAME

TEMPORARY_PREFIX = ".build-"


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A folder named after this machine and process, so that `clear_leftovers` knows whether it is still in use."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=folder))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(result: Path, target: Path) -> None:
    """Move the result into place in one step. An existing build (forced, damaged, or of a quicker process) is replaced
    file by file, so that there is a library at every moment."""
    try:
        result.rename(target)
    except OSError:
        for name in (LIBRARY_NAME, RECORD_NAME):
            (result / name).replace(target / name)


@contextlib.contextmanager
def lock(folder: Path, on_stage: Callable[[str], None]) -> Iterator[None]:
    """Allow one build at a time if the file system supports locks; otherwise the last build published wins."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_stage("waiting for a build in another process")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            on_stage("this file system does not support locks; continuing without one")
        yield


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary folders of builds that were killed on this machine."""
    own = f"{TEMPORARY_PREFIX}{socket.gethostname()}-"
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        pid = path.name.removeprefix(own).split("-")[0]
        if path.name.startswith(own) and pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
