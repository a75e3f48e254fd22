"""Files and folders that are written completely or not at all; checksums, JSON, CSV and arrays."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import glob
import hashlib
import io
import itertools
import json
import lzma
import math
import os
import re
import shutil
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from effexport.base.disk import ANOTHER_FILE, ANOTHER_FOLDER, disk_problem, write_error
from effexport.base.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
# How often a folder that another process removes at the same moment is created again.
RACES = 100
# Of a file that marks a folder.
BEGINNING_BYTES = 64 << 10
_CALLS = itertools.count()
# The temporary folders that threads of this process use at the moment; one of them at a time replaces its output.
_IN_USE: set[Path] = set()
_PUBLISHING = threading.Lock()


@dataclass
class _Writing:
    """A folder that this process writes: the descriptor that keeps other processes off, and the number of threads."""

    descriptor: int | None
    threads: int = 0


# By the file that is locked.
_WRITING: dict[Path, _Writing] = {}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write; it replaces `path` when the block ends without an error.

    After a failure `path` is unchanged and the sibling is removed; that of a killed process is removed by the next
    call. Raises OSError.
    """
    with _partial(path) as partial:
        try:
            yield partial
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()


@contextlib.contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`, for files that are made under their final names.

    It is removed at the end; that of a killed process is removed by the next call. Raises OSError.
    """
    with _partial(path) as folder:
        try:
            folder.mkdir()
            yield folder
        finally:
            _remove_folder(folder)


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that no other call uses."""
    for left in abandoned(path.parent, f".{path.name}.partial-"):
        if left.is_dir():
            _remove_folder(left)
        else:
            left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.partial-{_owner()}")
    with _in_use(partial):
        yield partial


def _owner() -> str:
    """The end of a temporary name: the process, and a number that no other call in it has."""
    return f"{os.getpid()}-{next(_CALLS)}"


@contextlib.contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Keep `abandoned` from listing a temporary folder of this process."""
    folder = folder.absolute()
    _IN_USE.add(folder)
    try:
        yield
    finally:
        _IN_USE.discard(folder)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file (text as UTF-8) or nothing. Raises OSError."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@dataclass(frozen=True)
class FolderKind:
    """A kind of output folder.

    title: with its article, for errors. mark: the file that every such folder contains. word: what its beginning says,
    because others use files of that name, too.
    """

    title: str
    mark: str
    word: bytes = b""

    def check(self, output: Path, *, force: bool) -> None:
        """Refuse an output that exists or cannot be written.

        With `force`, a folder of this kind, or an empty one, may be replaced. Raises UserError.
        """
        if output.is_symlink() and not output.exists():
            raise UserError(
                f"{output} is a link to {output.readlink()}, which does not exist; remove the link, or {ANOTHER_FOLDER}"
            )
        if not output.exists():
            check_creatable(output)
            return
        if not output.is_dir():
            raise UserError(f"{output} is a file; expected the path of a folder to create: choose another one with -o")
        if os.path.ismount(output.resolve()):
            raise UserError(f"{output} is a mount point, which cannot be replaced; choose a folder below it with -o")
        first = min((entry.name for entry in output.iterdir()), default=None)
        if first is not None and not self._is_marked(output):
            raise UserError(
                f"{output} has other files in it, such as {first!r}, and is not {self.title}, so --force does not "
                f"replace it; choose another folder with -o, such as {output / self.title.split()[-1]}"
            )
        if not force:
            raise UserError(f"{output} exists; choose another folder with -o, or replace it with --force")

    def _is_marked(self, output: Path) -> bool:
        mark = output / self.mark
        if not mark.is_file():
            return False
        with mark.open("rb") as stream:
            return self.word in stream.read(BEGINNING_BYTES)

    @contextlib.contextmanager
    def reserved(self, output: Path, *, force: bool) -> Iterator[None]:
        """Keep other processes from writing this folder during the block, so that its work is not done in vain.

        Raises as `check`, and UserError if another process writes it already.
        """
        self.check(output, force=force)
        place = place_of(output)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(created_folder(place.parent))
                stack.enter_context(only_writer(place, output))
            except OSError as error:
                raise write_error(output, error, ANOTHER_FOLDER) from error
            self.check(output, force=force)  # a process that has just ended may have written it
            yield

    @contextlib.contextmanager
    def new(self, output: Path, *, force: bool) -> Iterator[Path]:
        """Yield a temporary sibling folder to fill; it replaces `output` when the block ends without an error.

        An existing folder is refused without `force`, and survives any failure. A link stays, and the folder that it
        leads to is replaced. A process that is killed leaves the old folder or the new one (where the system cannot
        exchange two folders, for a moment neither), and siblings that the next call removes.
        Raises UserError when `output` exists, cannot be written or is being written by another process, DiskError
        when the disk is full or has failed.
        """
        place = place_of(output)
        building = building_folder(place)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.reserved(output, force=force))
                try:
                    stack.enter_context(_in_use(building))
                    self._recover(place)
                    self.check(output, force=force)  # it may have put an old folder back
                    stack.callback(_remove_folder, building)
                    building.mkdir()
                except OSError as error:
                    raise write_error(output, error, ANOTHER_FOLDER) from error
                yield building
                with _PUBLISHING:
                    self.check(output, force=force)
                    try:
                        _replace_folder(building, place)
                    except OSError as error:
                        raise write_error(output, error, ANOTHER_FOLDER) from error
        except Exception as error:
            # libraries wrap what the system says in errors of their own
            if disk_problem(error):
                raise write_error(output, error, ANOTHER_FOLDER) from error
            raise

    def _recover(self, output: Path) -> None:
        """Remove what killed processes left; put an old folder back if the kill came between two renames."""
        for old in abandoned(output.parent, f".{output.name}.replaced-"):
            if not output.exists() and (old / self.mark).is_file():
                old.rename(output)
            else:
                _remove_folder(old)
        for building in abandoned(output.parent, f".{output.name}.building-"):
            _remove_folder(building)


def place_of(output: Path) -> Path:
    """The path itself, or the one that it leads to if it is a link."""
    return output.resolve() if output.is_symlink() else output.absolute()


def building_folder(place: Path) -> Path:
    """A temporary sibling of an output folder that no other call uses."""
    return place.parent / f".{place.name}.building-{_owner()}"


def check_creatable(output: Path) -> None:
    """Raise UserError if a folder cannot be created at this path, before the work for it is done."""
    try:
        with created_folder(output.parent):
            tried = building_folder(output)  # one that the next call removes, should this process be killed
            _in_created_folder(output.parent, tried.mkdir)
            with contextlib.suppress(FileNotFoundError):  # another thread took it for a leftover
                tried.rmdir()
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write to {output.parent}: {reason}; choose another folder with -o") from error


@contextlib.contextmanager
def only_writer(place: Path, output: Path) -> Iterator[None]:
    """Keep other processes from writing the folder at `place`, which errors call `output`. Threads may.

    The system releases the lock when a process is killed. The file stays then, and the next process takes and removes
    it. Where the file system has no locks, nothing is kept off. Raises UserError if another process writes the folder
    already, and OSError if the lock cannot be created beside it.
    """
    file = place.absolute().with_name(f".{place.name}.lock")
    with _PUBLISHING:
        if file not in _WRITING:
            _WRITING[file] = _Writing(_locked(file, output))
        held = _WRITING[file]
        held.threads += 1
    try:
        yield
    finally:
        with _PUBLISHING:
            held.threads -= 1
            if held.threads == 0:
                del _WRITING[file]
                if held.descriptor is not None:
                    # while it is still locked: whoever has opened it meanwhile sees that it is gone
                    with contextlib.suppress(OSError):
                        file.unlink()
                    os.close(held.descriptor)


def _locked(file: Path, output: Path) -> int | None:
    """A descriptor that locks a file; None where the system has no locks. Raises UserError if another has locked it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        descriptor = _in_created_folder(
            file.parent, lambda: os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(
                f"{output} is being written by another process; wait until it has finished, or {ANOTHER_FOLDER}"
            ) from error
        except OSError:
            file.unlink(missing_ok=True)
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        os.close(descriptor)


def _exchanged(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # in the C library of Linux
    at_working_directory, exchange = -100, 2
    return rename is not None and not rename(
        at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), exchange
    )


def _replace_folder(building: Path, output: Path) -> None:
    if output.exists() and _exchanged(building, output):
        _remove_folder(building)
        return
    old = output.parent / f".{output.name}.replaced-{_owner()}"
    with _in_use(old):
        if output.exists():
            output.rename(old)
        try:
            building.rename(output)
        except BaseException:  # also of a signal
            if old.exists() and not output.exists():
                old.rename(output)
            raise
        _remove_folder(old)


def _remove_folder(folder: Path) -> None:
    """Remove a folder as far as possible; a signal that arrives meanwhile waits until that is done."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; those that were missing and are still empty at the end are removed again."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            for one in missing:
                one.rmdir()


def _in_created_folder(folder: Path, create: Callable[[], T]) -> T:
    """Create a file or a folder in a folder that another process may be removing, because it was empty."""
    for _ in range(RACES):
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return create()
    return create()


def abandoned(folder: Path, prefix: str) -> list[Path]:
    """Entries named PREFIX + process id, optionally with more after a hyphen, whose process does not run any more.

    This process's own id counts as ended, because an earlier process had the same id, except for what its threads use
    at the moment.
    """
    found = []
    for path in folder.glob(f"{glob.escape(prefix)}*"):
        owner = path.name.removeprefix(prefix).partition("-")[0]
        is_ours = re.fullmatch("[0-9]{1,9}", owner) and not path.is_symlink()
        if is_ours and not _is_running(int(owner)) and path.absolute() not in _IN_USE:
            found.append(path)
    return found


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_inside(path: Path, folder: Path) -> bool:
    """True if a path lies in a folder once all links are followed. False for a loop of links, and for a path that the
    system does not accept."""
    try:
        path.exists()  # raises for a name that is too long, which `resolve` does not
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long; a loop; a NUL
        return False


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_text(value: Any) -> str:
    """Indented JSON with a final newline. NaN and infinity become the strings "nan", "inf" and "-inf"."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """CSV with one header. None becomes an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def load_npz(path: Path, bfloat16: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """Every array of the file. Raises UserError when the file is missing or contains anything but arrays.

    bfloat16: names of arrays to be bfloat16, which .npz does not support: float32 is rounded, as `save_npz` widens.
    """
    import numpy as np

    expected = "expected an .npz file with one array per input name, as numpy.savez writes it"
    if path.is_dir():
        raise UserError(f"{path} is a folder; {expected}")
    try:
        # numpy leaves the file open if it opened it itself and the archive is damaged
        with path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise UserError(f"{path} holds a single array; {expected}")
            with loaded as file:
                arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"no input file at {path}; {expected}") from None
    except MemoryError as error:
        raise UserError(f"{path} holds an array that does not fit into memory; {expected}") from error
    # RuntimeError: an encrypted member; NotImplementedError: an unknown compression
    # TypeError: a shape of booleans, which numpy takes for one
    except (
        *(OSError, ValueError, TypeError, EOFError, RuntimeError),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    ) as error:
        reason = getattr(error, "strerror", None) or str(error).partition(". ")[0]
        if path.is_file() and not zipfile.is_zipfile(path):  # numpy then speaks of pickles
            reason = "it has another format or is damaged"
        raise UserError(f"{path} is not an .npz file of plain arrays: {reason}; {expected}") from error
    if not bfloat16:
        return arrays
    import ml_dtypes

    narrow = {name: array for name, array in arrays.items() if name in bfloat16 and array.dtype == np.float32}
    return arrays | {name: array.astype(ml_dtypes.bfloat16) for name, array in narrow.items()}


def save_npz(arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Write all arrays or nothing. bfloat16, which .npz does not support, becomes float32. Raises as write_error."""
    import numpy as np

    plain = {
        name: array.astype(np.float32) if array.dtype.name == "bfloat16" else array for name, array in arrays.items()
    }
    try:
        with replacing(path) as partial, partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **plain)
    except OSError as error:
        raise write_error(path, error, ANOTHER_FILE) from error


def write_output(output: Path, text: str) -> None:
    """Write a file of -o completely or not at all. Raises as `write_error`."""
    try:
        write_file(output, text)
    except OSError as error:
        raise write_error(output, error, ANOTHER_FILE) from error
