"""JSON files of effexport, read as typed records, and TOML files of users; errors say what to do.

A file is data that somebody else may have written. The size of a JSON file and the number of its values are limited
before anything is made of them, so that reading it takes neither long nor much memory. Its texts cannot drive a
terminal.
"""

from __future__ import annotations

import re
import threading
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from effexport.base.errors import UserError
from effexport.models.validation import FileTooLargeError, bounded_bytes

MOST_BYTES = 8 << 20
MOST_VALUES = 500_000
MOST_LEVELS = 50
LARGEST_INTEGER = 2**63 - 1
# In the texts of an honest file there are lines and tabs, but nothing else that controls a terminal, and nothing that
# turns the direction of the text around it.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Record = TypeVar("Record")
# msgspec 0.22 crashes if several threads are the first to read a kind of record.
_READING = threading.Lock()
if TYPE_CHECKING:
    Figure = float
else:
    # A number in a JSON file; records make a float of it with `figure` as soon as they are read.
    Integer = Annotated[int, msgspec.Meta(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
    Figure = Integer | float | Literal["nan", "inf", "-inf"]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
# A century, in seconds: sums and dates stay finite.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3.2e9)]


def text_of_file(file: Path, remedy: str) -> bytes:
    """The text of a JSON file of ours. Raises UserError for a file that is too large, or cannot be read."""
    try:
        return bounded_bytes(file, MOST_BYTES)
    except FileTooLargeError as error:
        raise UserError(f"{file} cannot be read: {error}; {remedy}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from error


def values_of_text(text: bytes, file: Path, remedy: str) -> dict[str, Any]:
    """The object in the text of a JSON file of ours, as plain values. Raises UserError for any other text.

    file: how errors name it. remedy: what its owner can do about damage.
    """
    # every value but the first comes after one of these
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if values > MOST_VALUES:
        raise UserError(f"{file} has about {values} values; expected at most {MOST_VALUES}; {remedy}")
    try:
        found = msgspec.json.decode(text)
    except RecursionError as error:
        raise UserError(f"{file} is damaged: its values are nested too deeply; {remedy}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged: {error}; {remedy}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged: it does not hold a JSON object; {remedy}")
    if problem := _problem(found):
        raise UserError(f"{file} is damaged: {problem}; {remedy}")
    return found


def _problem(values: dict[str, Any]) -> str:
    """The reason values cannot be those of an honest file, whatever their fields mean; "" if they can be."""
    level: list[Any] = [values]
    for _ in range(MOST_LEVELS):
        texts = [value for value in level if isinstance(value, str)]
        if CONTROL.search("".join(texts)):
            return f"a text has a control character: {next(filter(CONTROL.search, texts))[:80]!a}"
        if any(isinstance(value, int) and abs(value) > LARGEST_INTEGER for value in level):
            return "an integer does not fit into 64 bits"
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if "\n" in "".join(value):
                    return "a name has a line break"
                below += (*value, *value.values())
            elif isinstance(value, list):
                below += value
        if not below:
            return ""
        level = below
    return f"its values are nested more than {MOST_LEVELS} levels deep"


def values_of_file(file: Path, remedy: str) -> dict[str, Any]:
    """As `values_of_text`, of a file."""
    return values_of_text(text_of_file(file, remedy), file, remedy)


def record_from_values(values: Any, kind: type[Record], what: str, remedy: str) -> Record:
    """A typed record of plain values. Raises UserError for values of another type, or out of bounds.

    what: how errors name the file. remedy: what its owner can do about damage.
    """
    try:
        with _READING:
            return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        # the error quotes the value, however long it is
        raise UserError(f"{what} is damaged: {str(error)[:300]}; {remedy}") from error


def figure(value: Any) -> Any:
    """The inverse of what `files.json_text` does to NaN and infinity, for one value."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def read_record(file: Path, kind: type[Record], remedy: str) -> Record:
    """A JSON file of ours as a typed record. Raises UserError for any other file. remedy: see `values_of_file`."""
    return record_from_values(values_of_file(file, remedy), kind, str(file), remedy)


# For files that people write. The parser's time and memory grow with the square of the parts of a key, a.b.c.
MOST_TOML_BYTES = 256 << 10
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
        data = bounded_bytes(path, MOST_TOML_BYTES)
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
