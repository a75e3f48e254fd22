"""Texts from files and from standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from effexport.errors import UserError
from effexport.models.validation import FileTooLargeError, bounded_bytes

STDIN = Path("-")
MOST_BYTES = 1 << 30


def bytes_of_file(path: Path) -> bytes:
    """The contents of a file, or of standard input for STDIN. Raises UserError for one that is missing or empty."""
    try:
        data = bytes_of_stdin() if path == STDIN else bounded_bytes(path, MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"no text file at {path}") from None
    except FileTooLargeError as error:
        raise UserError(f"cannot read {path} as a text: {error}; split it") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not data:
        raise UserError(f"{name_of(path)} is empty; expected at least one byte of text")
    return data


def bytes_of_stdin() -> bytes:
    """All of standard input. Raises UserError if it is closed or cannot be read."""
    if sys.stdin is None:
        raise UserError("standard input is closed; expected a text on it, or the name of a file")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UserError(f"cannot read standard input: {error.strerror}; expected a text on it") from error


def text_of_file(path: Path) -> str:
    """A text in UTF-8. Raises UserError as `bytes_of_file`, and for bytes that are not UTF-8."""
    return decoded(bytes_of_file(path), path)


def decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name_of(path)} is not UTF-8: byte {error.start} is 0x{data[error.start]:02X}; expected a text in UTF-8: "
            "convert it, for example with iconv"
        ) from error


def lines_of_file(path: Path) -> list[str]:
    """The lines of a text in UTF-8, each a text of its own. Raises UserError as `text_of_file`, and for empty lines."""
    lines = text_of_file(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"line {number} of {name_of(path)} is empty; expected one text per line")
    return lines


def objects_of_lines(path: Path, example: str) -> Iterator[tuple[str, str, str | None, dict[str, Any]]]:
    """(where it stands, text, second text or None, all fields) of each line of a file of JSON objects.

    Raises UserError with the number of a line that has no text. example: of a line.
    """
    for number, line in enumerate(text_of_file(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            fields: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}") from error
        text, pair = (fields.get("text"), fields.get("pair")) if isinstance(fields, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(pair, str | None):
            raise UserError(f"{where} has no text; expected {example}")
        yield where, text, pair, fields


def name_of(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)
