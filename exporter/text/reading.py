"""Texts from files and from standard input: as lines, as windows of a model, and as samples of what it will read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.base.files import load_npz
from effexport.models.validation import FileTooLargeError, bounded_bytes
from effexport.runners.runner import checked_feeds, limits_from_spec
from effexport.text.fast_tokenizer import tokenizer_from_artifact
from effexport.text.task import ByteTokenizer, Encoding, PreparedText, Reader, TextOptions, reader_from_spec

if TYPE_CHECKING:
    from effexport.base.dtypes import Array


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


def windows_of_file(path: Path, artifact: Artifact, options: TextOptions) -> PreparedText:
    """A file as inputs of an artifact, in windows if it is longer than the model allows.

    Raises UserError for a file that cannot be read, and for a model that reads no text.
    """
    reader = reader_from_spec(artifact.spec, tokenizer_from_artifact(artifact))
    text, encoding = encoded(bytes_of_file(path), path, reader)
    return reader.cut(text, None, encoding, options.max_window, options.stride or 0)


def encoded(data: bytes, path: Path, reader: Reader) -> tuple[str, Encoding]:
    """The contents of a file as a text and its tokens. A byte-level model also reads bytes that are not a text: "".

    Raises UserError for bytes that are not UTF-8, and for a text without tokens.
    """
    if isinstance(reader.tokenizer, ByteTokenizer):
        return "", reader.tokenizer.encode_bytes(data)
    text = decoded(data, path)
    return text, reader.encode(text, None)


ARRAYS, JSON_LINES = ".npz", ".jsonl"
# Fewer say too little about the largest activations; more change them little and take time.
FEWEST, MOST = 64, 128
# Tokens of a sample of a short text.
SHORTEST_WINDOW = 16
LABELS = "labels"
Feeds = Mapping[str, "Array"]


def samples_from_file(path: Path, artifact: Artifact) -> list[Feeds]:
    """The samples of a file, each as the inputs of one run: rows of arrays (.npz), texts (.jsonl, an object with text
    in each line), or windows of a text (any other file). At most MOST, spread over the file.

    Raises UserError for a file that cannot be read, does not fit the model or has fewer than FEWEST samples.
    """
    suffix = path.suffix.lower()
    if suffix == ARRAYS:
        found = samples_of_arrays(path, artifact)
    else:
        try:
            reader = reader_from_spec(artifact.spec, tokenizer_from_artifact(artifact))
        except UserError as error:
            inputs = ", ".join(map(str, artifact.spec.inputs))
            raise UserError(
                f"{path} is not {ARRAYS}, and this model reads no text; expected FILE{ARRAYS} with its inputs: {inputs}"
            ) from error
        found = samples_of_lines(path, reader) if suffix == JSON_LINES else windows_of_text(path, reader, artifact)
    if len(found) < FEWEST:
        raise UserError(f"{path} has {len(found)} samples; expected at least {FEWEST}, of what the model will read")
    return spread(found, MOST)


def spread(samples: Sequence[Feeds], most: int) -> list[Feeds]:
    """At most so many, at equal distances."""
    places = np.linspace(0, len(samples) - 1, min(most, len(samples))).round().astype(int)
    return [samples[place] for place in places]


def samples_of_arrays(path: Path, artifact: Artifact) -> list[Feeds]:
    spec = artifact.spec
    arrays = {name: array for name, array in load_npz(path).items() if name != LABELS}
    known = [tensor.name for tensor in spec.inputs]
    unknown = [name for name in arrays if name not in known]
    if unknown or not arrays:
        raise UserError(
            f"{path} holds {', '.join(arrays) or 'no arrays'}; expected the inputs of this model, one row for each "
            f"sample: {', '.join(map(str, spec.inputs))}"
        )
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(rows.values())) != 1:
        sizes = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise UserError(f"{path}: the arrays have different numbers of rows: {sizes}; expected one row for each sample")
    limits = limits_from_spec(spec)
    count = next(iter(rows.values()))
    places = [int(place) for place in np.linspace(0, count - 1, min(count, MOST)).round()]
    found: list[Feeds] = []
    for place in places:
        try:
            found.append(checked_feeds({n: a[place : place + 1] for n, a in arrays.items()}, spec.inputs, limits))
        except UserError as error:
            raise UserError(f"row {place} of {path} does not fit the model: {error}") from error
    return found


def samples_of_lines(path: Path, reader: Reader) -> list[Feeds]:
    found: list[Feeds] = []
    for where, text, pair, _ in objects_of_lines(path, '{"text": "…"}'):
        try:
            found.append(reader.split(text, pair, limit=None, stride=0).runs[0])
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return found


def windows_of_text(path: Path, reader: Reader, artifact: Artifact) -> list[Feeds]:
    """Windows as long as the model is built for, or shorter ones if the text would give too few."""
    data = bytes_of_file(path)
    if b"\0" in data:
        raise UserError(f"{path} is not a text: it has zero bytes; expected a text, FILE{JSON_LINES} or FILE{ARRAYS}")
    text, encoding = encoded(data, path, reader)
    window = min(artifact.spec.model.seq_len, max(SHORTEST_WINDOW, len(encoding) // FEWEST))
    prepared = reader.cut(text, None, encoding, window, 0)
    full = [place for place, tokens in enumerate(prepared.windows) if len(tokens) == window]
    return [{name: array[place : place + 1] for name, array in prepared.feeds.items()} for place in full]
