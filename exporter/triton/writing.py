"""Changes to a repository that a server may be reading: all of them, or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from effexport.errors import UserError
from effexport.files import abandoned, created_folder
from effexport.triton.content import write_content
from effexport.triton.models import ModelChange


@contextlib.contextmanager
def locked_repository(repository: Path) -> Iterator[None]:
    """The folder exists, and nobody else packages into it. After a failure, no folder is left that was not there."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(created_folder(repository))
            handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UserError(f"cannot write to {repository}: {error.strerror}; choose another folder with -o") from error
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        clear_leftovers(repository)
        yield


def write_changes(repository: Path, changes: Sequence[ModelChange], pages: Mapping[str, bytes]) -> None:
    """Write everything aside, then rename it into place; a failure in between takes back what was renamed.

    A folder of a version appears complete, or not at all, also to a server that looks while this runs.
    """
    written = [change for change in changes if change.status != "unchanged"]
    if not written and not pages:
        return
    staging = staging_folder(repository)
    undo: list[Callable[[], object]] = []
    try:
        staging.mkdir()
        for change in written:
            stage(change, staging / change.name)
        write_content(pages, staging / ".pages")
        for change in written:
            commit_model(repository, change, staging, undo)
        for name in pages:
            move(staging / ".pages" / name, repository / name, staging, undo)
    except BaseException as error:
        for step in reversed(undo):
            step()
        if isinstance(error, OSError):
            raise UserError(f"cannot write to {repository}: {error}; it is as it was before") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def stage(change: ModelChange, folder: Path) -> None:
    folder.mkdir()
    if change.content is not None:
        write_content(change.content, folder / str(change.version))
    write_content(change.files, folder)


def commit_model(repository: Path, change: ModelChange, staging: Path, undo: list[Callable[[], object]]) -> None:
    source, target = staging / change.name, repository / change.name
    if not target.exists():
        move(source, target, staging, undo)
        return
    if change.content is not None:
        move(source / str(change.version), target / str(change.version), staging, undo)
    # the configuration last: what it speaks of is there by then
    for name in sorted(change.files, key=lambda name: not name.startswith("warmup/")):
        if not (target / name).parent.exists():
            (target / name).parent.mkdir()
            undo.append((target / name).parent.rmdir)
        move(source / name, target / name, staging, undo)


def move(source: Path, target: Path, staging: Path, undo: list[Callable[[], object]]) -> None:
    """Rename a new folder, or a file over an old one, and remember how to take it back."""
    if target.is_file():
        kept = staging / f".kept-{len(undo)}"
        os.link(target, kept)
        os.replace(source, target)
        undo.append(lambda: os.replace(kept, target))
    else:
        os.rename(source, target)
        undo.append(lambda: os.rename(target, source))


def staging_folder(repository: Path) -> Path:
    """Beside the repository, where no server looks; inside it only where the parent is another file system, or not
    ours to write to."""
    name = f".{repository.resolve().name}.packaging-{os.getpid()}"
    parent = repository.resolve().parent
    beside = parent.stat().st_dev == repository.stat().st_dev and os.access(parent, os.W_OK)
    return (parent if beside else repository.resolve()) / name


def clear_leftovers(repository: Path) -> None:
    """Remove what killed processes left behind."""
    for parent in (repository.resolve().parent, repository.resolve()):
        for folder in abandoned(parent, f".{repository.resolve().name}.packaging-"):
            shutil.rmtree(folder, ignore_errors=True)
