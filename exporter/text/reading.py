"""Texts from files and from standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from effexport.errors import UserError

STDIN = Path("-")


def bytes_of_file(path: Path) -> bytes:
    """The contents of a file, or of standard input for STDIN. Raises UserError for one that is missing or empty."""
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no text file at {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not data:
        raise UserError(f"{name_of(path)} is empty; expected at least one byte of text")
    return data


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


def name_of(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)
