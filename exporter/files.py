"""Arrays in and out of .npz files."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import UserError

if TYPE_CHECKING:
    from effexport.runners import Array


def load_npz(path: Path) -> dict[str, Array]:
    """Every array of the file. Raises UserError when there is no such file, or it holds anything but arrays."""
    try:
        # numpy leaks the file that it opens itself when the archive is damaged
        with path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise UserError(f"{path} holds a single array; expected an .npz file with one array per input name")
            with loaded as file:
                return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"no input file at {path}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not an .npz file of plain arrays: {error}") from error


def check_writable(path: Path) -> None:
    """Refuse an output path early, before the work is done."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected the path of an .npz file to write")
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist; create it, or choose another path with --output")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write to {path.parent}; choose another path with --output")


def save_npz(arrays: Mapping[str, Array], path: Path) -> None:
    """Write all arrays or nothing. bfloat16, which .npz cannot name, becomes float32."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    plain = {
        name: array.astype(np.float32) if array.dtype.name == "bfloat16" else array for name, array in arrays.items()
    }
    try:
        with partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **plain)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
