"""Texts from files and from standard input, and the tokenizer that a build takes into its artifact."""

from __future__ import annotations

import filecmp
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import Artifact
from effexport.base.errors import MissingExtraError, UserError
from effexport.base.files import load_npz
from effexport.models.checkpoints.spec import CONFIG, GENERATION_CONFIG
from effexport.models.validation import MOST_BYTES_OF_VOCABULARY, FileTooLargeError, bounded_bytes
from effexport.runners.runner import checked_feeds, limits_from_spec
from effexport.tasks.fast_tokenizer import (
    REMEDY,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    VOCABULARIES,
    fast_tokenizer,
    has_tokenizer,
    refuse_custom_code,
    tokenizer_from_artifact,
)
from effexport.tasks.task import ByteTokenizer, Encoding, PreparedText, Reader, TextOptions, reader_from_spec

if TYPE_CHECKING:
    from effexport.base.dtypes import Array


@dataclass(frozen=True)
class TokenizerSource:
    """The source of an artifact's tokenizer.

    folder: with the tokenizer's files; None for no tokenizer. wanted: whether a folder without a tokenizer is an error.
    config: the config.json that goes with it, None for none.
    """

    folder: Path | None = None
    wanted: bool = False
    config: Path | None = None


NO_TOKENIZER = TokenizerSource()


def tokenizer_of_build(tokenizer: str | Path | None, checkpoint: Path | None) -> TokenizerSource:
    """The source that `build --tokenizer` names: a folder, "none", or None for the checkpoint's if it has one."""
    config = None if checkpoint is None else checkpoint / CONFIG
    if tokenizer is None:
        return TokenizerSource(checkpoint, config=config)
    if str(tokenizer) == "none":
        return TokenizerSource(config=config)
    folder = Path(tokenizer)
    if not folder.is_dir():
        raise UserError(f"--tokenizer is {tokenizer}; expected a folder with {TOKENIZER_JSON}, or none")
    return TokenizerSource(folder, wanted=True, config=config)


def tokenizer_of_refit(previous: Artifact, checkpoint: Path | None) -> tuple[TokenizerSource, list[str]]:
    """An artifact keeps its tokenizer when it gets other weights. Also returns sentences for the report."""
    files = previous.manifest.files
    own = previous.path / CONFIG if CONFIG in files else None
    config = own if checkpoint is None else checkpoint / CONFIG
    kept = previous.path / TOKENIZER_JSON
    notes = []
    if checkpoint is not None and kept.is_file() and (other := checkpoint / TOKENIZER_JSON).is_file():
        notes = [
            f"The tokenizer is that of {previous.path.resolve().name}; {checkpoint.resolve().name} has another one: if "
            "its weights were trained with that, build the artifact again."
        ] * (not filecmp.cmp(other, kept, shallow=False))
    folder = previous.path if any(name in files for name in TOKENIZER_FILES) else None
    return TokenizerSource(folder, config=config), notes


def copy_tokenizer(source: TokenizerSource, target: Path, vocab_size: int | None) -> list[str]:
    """Copy config.json, the options of `generate` and the tokenizer's files into an artifact's folder, and check that
    the tokenizer works.

    vocab_size: the number of tokens that the model knows, None if it reads none. A tokenizer without tokenizer.json is
    converted with transformers. Returns sentences for the report: what cannot be used, and what it needs.
    Raises UserError for a damaged tokenizer, one with code of its own, and one that does not fit the model.
    """
    if source.config is not None:
        copy_bounded(source.config, target / CONFIG)
        if (options := source.config.with_name(GENERATION_CONFIG)).is_file():
            copy_bounded(options, target / GENERATION_CONFIG)
    if source.folder is None:
        return []
    if not has_tokenizer(source.folder):
        if source.wanted:
            raise UserError(
                f"{source.folder} has no tokenizer; expected a folder with {TOKENIZER_JSON}, or with "
                f"{', '.join(VOCABULARIES[:4])}"
            )
        return []
    refuse_custom_code(source.folder)
    if vocab_size is None:
        raise UserError("--tokenizer is for models that read tokens; this one has no input_ids: leave it out")
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file():
            copy_bounded(source.folder / name, target / name)
    notes = [] if (target / TOKENIZER_JSON).is_file() else converted(source, target)
    return notes or checked(source.folder, target, vocab_size)


def copy_bounded(file: Path, copy: Path) -> None:
    """Copy a file, unless it is larger than the largest vocabulary. Raises UserError."""
    try:
        copy.write_bytes(bounded_bytes(file, MOST_BYTES_OF_VOCABULARY))
    except FileTooLargeError as error:
        raise UserError(f"{file} cannot be used: {error}; {REMEDY}") from error


def converted(source: TokenizerSource, target: Path) -> list[str]:
    """Write tokenizer.json for a folder without one. Returns why that is not possible."""
    found = [name for name in VOCABULARIES if (target / name).is_file()]
    what = f"The tokenizer ({', '.join(found)}) has no {TOKENIZER_JSON}"
    remedy = "until then, tokens can be given, and texts cannot"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return [f"{what}; build again with transformers installed, which converts it; {remedy}."]
    try:
        # from the copies: without code, and with the config.json of the artifact
        tokenizer = AutoTokenizer.from_pretrained(str(target), local_files_only=True, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(target / TOKENIZER_JSON))
    except Exception as error:  # transformers raises anything
        reason = " ".join(str(error).split())[:300]
        if source.wanted:
            raise UserError(f"{source.folder}: {what}, and transformers cannot convert it: {reason}") from error
        return [f"{what}, and transformers cannot convert it: {reason}; {remedy}."]
    return []


def checked(origin: Path, target: Path, vocab_size: int) -> list[str]:
    """Open a copied tokenizer. Returns why it was not checked. Raises UserError for one that does not fit the model."""
    try:
        tokenizer = fast_tokenizer(target)
    except MissingExtraError as error:
        return [f"The tokenizer was copied and not checked: {error}."]
    except UserError as error:
        raise UserError(str(error).replace(str(target), str(origin))) from error
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer in {origin} has tokens up to {tokenizer.vocab_size - 1}; the model knows 0 to "
            f"{vocab_size - 1}: give the tokenizer of this model with --tokenizer DIR, or leave it out with "
            "--tokenizer none"
        )
    return []


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
