"""Write changes to a repository that a server may be reading: all of them, or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.disk import ANOTHER_FOLDER, write_error
from effexport.files import abandoned, created_folder
from effexport.triton.content import write_content

if TYPE_CHECKING:
    from effexport.triton.models import ModelChange


@contextlib.contextmanager
def locked_repository(repository: Path) -> Iterator[None]:
    """Create the repository if missing, and keep other packaging processes out. After a failure, remove it if new."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(created_folder(repository))
            handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise write_error(repository, error, ANOTHER_FOLDER) from error
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        clear_leftovers(repository)
        yield


def write_changes(repository: Path, changes: Sequence[ModelChange], pages: Mapping[str, bytes]) -> None:
    """Write everything to a staging folder, then rename it into place; a failure undoes the renames.

    A server that reads the repository meanwhile sees complete versions only.
    """
    written = [change for change in changes if change.status != "unchanged"]
    if not written and not pages:
        return
    staging = staging_folder(repository)
    try:
        _write_or_undo(repository, written, pages, staging)
    except OSError as error:
        raise write_error(repository, error, f"{ANOTHER_FOLDER}; nothing was changed") from error


def _write_or_undo(repository: Path, written: Sequence[ModelChange], pages: Mapping[str, bytes], staging: Path) -> None:
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
    except BaseException:
        for step in reversed(undo):
            step()
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
    # the configuration last, after the files that it names
    for name in sorted(change.files, key=lambda name: not name.startswith("warmup/")):
        if not (target / name).parent.exists():
            (target / name).parent.mkdir()
            undo.append((target / name).parent.rmdir)
        move(source / name, target / name, staging, undo)


def move(source: Path, target: Path, staging: Path, undo: list[Callable[[], object]]) -> None:
    """Rename a new folder, or a file over an old one, and add the step that undoes it."""
    if target.is_file():
        kept = staging / f".kept-{len(undo)}"
        os.link(target, kept)
        os.replace(source, target)
        undo.append(lambda: os.replace(kept, target))
    else:
        os.rename(source, target)
        undo.append(lambda: os.rename(target, source))


def staging_folder(repository: Path) -> Path:
    """A folder beside the repository, where no server reads; inside it if the parent is another file system or cannot
    be written."""
    name = f".{repository.resolve().name}.packaging-{os.getpid()}"
    parent = repository.resolve().parent
    beside = parent.stat().st_dev == repository.stat().st_dev and os.access(parent, os.W_OK)
    return (parent if beside else repository.resolve()) / name


def clear_leftovers(repository: Path) -> None:
    """Remove what killed processes left behind."""
    for parent in (repository.resolve().parent, repository.resolve()):
        for folder in abandoned(parent, f".{repository.resolve().name}.packaging-"):
            shutil.rmtree(folder, ignore_errors=True)
