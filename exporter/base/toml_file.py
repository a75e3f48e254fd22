"""Reads TOML files, with errors that say what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from effexport.base.errors import UserError
from effexport.models.validation import FileTooLargeError, bounded_bytes

# For files that people write. The parser's time and memory grow with the square of the parts of a key, a.b.c.
MOST_BYTES = 256 << 10
MOST_DOTS = 100


def check_integers(value: object) -> None:
    """Raise ValueError for an integer that TOML does not have, anywhere in a document; Python reads any number."""
    if isinstance(value, int) and value.bit_length() >= 64:
        raise ValueError("it has an integer of more than 64 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_integers(item)


def read_toml(path: Path, kind: str, example: str) -> dict[str, Any]:
    """The contents of a TOML file. kind: what the file is for; example: ends the error for a missing file.

    Raises UserError for a file that is missing, or is not TOML.
    """
    if path.is_dir():
        raise UserError(f"the {kind} file {path} is a folder; {example}")
    try:
        data = bounded_bytes(path, MOST_BYTES)
        if any(line.count(b".") > MOST_DOTS for line in data.splitlines()):
            raise UserError(f"the {kind} file {path} has a line with more than {MOST_DOTS} dots; {example}")
        document = tomllib.loads(data.decode())
        check_integers(document)
        return document
    except FileNotFoundError:
        raise UserError(f"no {kind} file at {path}; {example}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the {kind} file {path}: it is not text; expected TOML") from error
    except OSError as error:
        raise UserError(f"cannot read the {kind} file {path}: {error.strerror}; expected a TOML file") from error
    except FileTooLargeError as error:
        raise UserError(f"cannot read the {kind} file {path}: {error}; {example}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, as is that of long numbers
        reason = str(error).partition("; use sys.")[0]
        raise UserError(f"cannot read the {kind} file {path}: it is not TOML: {reason}") from error
