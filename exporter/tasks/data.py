"""Labelled data from a text, lines of JSON or arrays: inputs, and the answers that are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.errors import UserError
from effexport.base.files import load_npz
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.encoder.spec import LOGITS
from effexport.tasks.fast_tokenizer import json_of, tokenizer_from_artifact
from effexport.tasks.figures import LANGUAGE, Objective
from effexport.tasks.task import (
    BYTE_MASK,
    TOKENS,
    ByteTokenizer,
    Encoding,
    PreparedText,
    Reader,
    Tokenizer,
    reader_from_spec,
)
from effexport.tasks.tasks import Labels, labels_from_config
from effexport.tasks.texts import ARRAYS, JSON_LINES, LABELS, bytes_of_file, encoded, objects_of_lines

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec


# Of places without an answer, as in PyTorch's cross_entropy.
IGNORED = -100
# Share of the tokens that are masked, as BERT was trained.
MASKED_SHARE = 0.15


@dataclass(frozen=True)
class LabelledRows:
    """Rows that run together. labels: int64 [rows] or [rows, tokens], IGNORED where nothing is asked.

    text_bytes: how many bytes of text the labels of each row stand for, [rows]; None if that is not known.
    """

    feeds: Mapping[str, Array]
    labels: Array
    text_bytes: Array | None = None

    @property
    def tokens(self) -> int:
        """Of each row; 1 for a model without an axis of tokens."""
        first = next(iter(self.feeds.values()))
        return first.shape[1] if first.ndim > 1 else 1


@dataclass(frozen=True)
class Windows:
    """Windows that a text is cut into.

    length: tokens of a window; None for as many as the model takes.
    stride: tokens that neighbours share; they are scored once.
    limit: the most rows.
    seed: of the places that are masked.
    """

    length: int | None = None
    stride: int = 0
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = (
            ("window", self.length, 2),
            ("stride", self.stride, 0),
            ("rows", self.limit, 1),
            ("seed", self.seed, 0),
        )
        for name, value, least in given:
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; expected at least {least}")


def objective_of(spec: BuildSpec) -> Objective:
    """Raises UserError for a model without logits."""
    outputs = {tensor.name: tensor.dims for tensor in spec.outputs}
    dims = outputs.get(LOGITS)
    if dims is None:
        raise UserError(
            f"{spec.model.title} returns {', '.join(outputs)}, which labels cannot judge; expected {LOGITS}: build an "
            "encoder with --lm-head, or a checkpoint with its head"
        )
    if len(dims) == 2:
        return Objective.CLASSIFICATION
    if spec.model.decoder is not None:
        return Objective.SEQ2SEQ
    kind = spec.model.task
    if kind == "lm-head" or spec.model.is_causal:
        return Objective.LANGUAGE_MODEL
    if kind == "masked-lm" or dims[-1] == spec.model.input_limits.get(TOKENS):
        return Objective.MASKED_LANGUAGE_MODEL
    return Objective.TOKEN_CLASSIFICATION


def rows_of_text(
    reader: Reader, encoding: Encoding, text: str, objective: Objective, windows: Windows, batch: int
) -> Iterator[LabelledRows]:
    """The windows of a text, for a language model or a masked one. text: "" if it was bytes."""
    masked = objective == Objective.MASKED_LANGUAGE_MODEL
    inputs = with_masks(encoding, reader.tokenizer, windows.seed) if masked else encoding
    prepared = reader.cut(text, None, inputs, windows.length, windows.stride)
    labels = (masked_labels if masked else next_labels)(prepared, encoding, inputs)
    text_bytes = None if masked else bytes_of_labels(prepared, labels, bytes_of_tokens(encoding, text))
    start, end = 0, len(labels) if windows.limit is None else min(windows.limit, len(labels))
    for whole in prepared.rows(batch):
        feeds = {name: array[: end - start] for name, array in whole.items()}
        rows = slice(start, start + len(feeds[TOKENS]))
        if rows.start == rows.stop:
            return
        start = rows.stop
        length = feeds[TOKENS].shape[1]
        yield LabelledRows(feeds, labels[rows, :length], None if text_bytes is None else text_bytes[rows])


def with_masks(encoding: Encoding, tokenizer: Tokenizer, seed: int) -> Encoding:
    """The same tokens, some of those of the text masked. Raises UserError for a tokenizer without a mask."""
    mask = BYTE_MASK if isinstance(tokenizer, ByteTokenizer) else tokenizer.mask_token_id
    if mask is None:
        raise UserError("the tokenizer of this artifact has no mask token, so there is nothing to predict")
    drawn = np.random.default_rng(seed).random(len(encoding)) < MASKED_SHARE
    chosen = drawn & np.array([number is not None for number in encoding.sequence])
    return replace(encoding, ids=tuple(np.where(chosen, mask, encoding.ids).tolist()))


def masked_labels(prepared: PreparedText, encoding: Encoding, inputs: Encoding) -> Array:
    """[rows, tokens]: the token behind each mask, in the first window that has it."""
    labels = np.full(prepared.feeds[TOKENS].shape, IGNORED, np.int64)
    for row, column, place in new_places(prepared):
        if inputs.ids[place] != encoding.ids[place]:
            labels[row, column] = encoding.ids[place]
    return labels


def next_labels(prepared: PreparedText, encoding: Encoding, inputs: Encoding) -> Array:
    """[rows, tokens]: the token of the text that follows, in the first window that has it with a token before it."""
    labels = np.full(prepared.feeds[TOKENS].shape, IGNORED, np.int64)
    for row, column, place in new_places(prepared):
        if column and encoding.sequence[place] is not None:
            labels[row, column - 1] = encoding.ids[place]
    return labels


def new_places(prepared: PreparedText) -> Iterator[tuple[int, int, int]]:
    """(row, column, place in the text) of all tokens that no earlier row has."""
    end = -1
    for row, places in enumerate(prepared.places):
        own = [place for place in places if prepared.encoding.sequence[place] is not None]
        for column, place in enumerate(places):
            if place > end and place <= own[-1]:
                yield row, column, place
        end = max(end, own[-1])


def bytes_of_tokens(encoding: Encoding, text: str) -> Array:
    """The bytes of the text that each token adds to those before it; of text that was bytes, one each."""
    if not text:
        return np.ones(len(encoding), np.int64)
    ends = np.cumsum([0, *(len(character.encode()) for character in text)])
    covered = [
        end if number is not None else 0 for (_, end), number in zip(encoding.offsets, encoding.sequence, strict=True)
    ]
    return np.diff(ends[np.maximum.accumulate(covered)], prepend=0)


def bytes_of_labels(prepared: PreparedText, labels: Array, token_bytes: Array) -> Array:
    """Bytes that the scored tokens of each row cover.

    token_bytes: of each token of the text.
    """
    counts = np.zeros(len(labels), np.int64)
    for row, column, place in new_places(prepared):
        if column and labels[row, column - 1] != IGNORED:
            counts[row] += token_bytes[place]
    return counts


def rows_of_arrays(
    arrays: Mapping[str, Array], spec: BuildSpec, objective: Objective, batch: int, limit: int | None
) -> list[LabelledRows]:
    """Inputs by name, and `labels`. Raises UserError for labels that are missing or do not fit."""
    if LABELS not in arrays:
        raise UserError(f"the arrays are {', '.join(arrays)}; expected the model's inputs and {LABELS}")
    labels = np.asarray(arrays[LABELS])
    feeds = {name: array for name, array in arrays.items() if name != LABELS}
    lead = next((array for array in feeds.values()), labels)
    if spec.model.decoder is not None:
        lead = feeds.get(spec.model.decoder.token, labels)
    wanted = lead.shape[:1] if objective == Objective.CLASSIFICATION else lead.shape[:2]
    if labels.dtype.kind not in "iu" or labels.shape != wanted:
        raise UserError(
            f"{LABELS} is {labels.dtype} {list(labels.shape)}; expected integers {list(wanted)}: one for each "
            f"{'row' if len(wanted) == 1 else 'token'}, {IGNORED} where nothing is asked"
        )
    if any(len(array) != len(labels) for array in feeds.values()):
        sizes = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise UserError(f"the arrays have different numbers of rows: {sizes}; expected the same")
    count = len(labels) if limit is None else min(limit, len(labels))
    return [
        LabelledRows({name: array[start:end] for name, array in feeds.items()}, labels[start:end].astype(np.int64))
        for start, end in ((start, min(start + batch, count)) for start in range(0, count, batch))
    ]


def rows_of_texts(prepared: Sequence[PreparedText], labels: Sequence[int], batch: int) -> list[LabelledRows]:
    """Texts with a class each, in their order. Those of equal length that follow each other run together, unless other
    rows could change an answer."""
    found: list[LabelledRows] = []
    for one, number in zip(prepared, labels, strict=True):
        feeds, label = one.runs[0], np.array([number], np.int64)
        last = None if one.alone or not found or len(found[-1].labels) == batch else found[-1]
        if last is not None and last.feeds[TOKENS].shape[1] == feeds[TOKENS].shape[1]:
            joined = {name: np.concatenate([last.feeds[name], array]) for name, array in feeds.items()}
            found[-1] = LabelledRows(joined, np.concatenate([last.labels, label]))
        else:
            found.append(LabelledRows(feeds, label))
    return found


def same_labels(first: Sequence[LabelledRows], second: Sequence[LabelledRows]) -> bool:
    """True if both data sets have the same labels, however the rows are put together."""
    ours, theirs = ([row for some in data for row in some.labels] for data in (first, second))
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def rows_of_data(data: Path | Mapping[str, Array], artifact: Artifact, windows: Windows) -> list[LabelledRows]:
    """The labelled rows of arrays with `labels`, or of a file: .npz has such arrays, .jsonl an object with text and
    label in each line, and any other file is a text that a language model is asked for.

    Raises UserError for a file that cannot be read, or for data that does not fit the model.
    """
    spec, objective = artifact.spec, objective_of(artifact.spec)
    batch = 1 if spec.model.why_not_invariant else spec.batch
    if not isinstance(data, Path) or data.suffix == ARRAYS:
        arrays = load_npz(data) if isinstance(data, Path) else data
        rows = rows_of_arrays(arrays, spec, objective, batch, windows.limit)
    else:
        rows = rows_of_text_file(data, artifact, objective, windows, batch)
    if not any((some.labels != IGNORED).any() for some in rows):
        raise UserError("the data asks for no answer; expected labels, or a text of several tokens")
    return rows


def rows_of_text_file(
    path: Path, artifact: Artifact, objective: Objective, windows: Windows, batch: int
) -> list[LabelledRows]:
    spec = artifact.spec
    reader = reader_from_spec(spec, tokenizer_from_artifact(artifact))
    if path.suffix == JSON_LINES:
        if objective != Objective.CLASSIFICATION:
            raise UserError(f"{path} has texts with a class each; {spec.model.title} is a {objective}: give a text")
        classes = spec.outputs[0].dims[-1]
        assert isinstance(classes, int), "a classifier has a fixed number of classes"
        names = class_names(labels_from_config(json_of(artifact.path / CONFIG), classes))
        examples = examples_of_lines(path, names, windows.limit)
        prepared = [reader.whole(text, pair, str(objective)) for text, pair, _ in examples]
        return rows_of_texts(prepared, [label for *_, label in examples], batch)
    if objective not in LANGUAGE:
        raise UserError(
            f"{path} is a text without labels; for {objective}, expected {ARRAYS} with the inputs and labels"
            + (f", or {JSON_LINES} with text and label in each line" if objective == Objective.CLASSIFICATION else "")
        )
    text, encoding = encoded(bytes_of_file(path), path, reader)
    return list(rows_of_text(reader, encoding, text, objective, windows, batch))


def class_names(labels: Labels) -> tuple[str, ...]:
    """Raises UserError for a model whose logits are not one class of several."""
    if labels.problem_type not in (None, "single_label_classification") or len(labels.names) < 2:
        raise UserError(
            f"the model does {labels.problem_type or 'regression'} (problem_type in {CONFIG}); expected one class of "
            "several for each text"
        )
    return labels.names


def examples_of_lines(path: Path, names: Sequence[str], limit: int | None) -> list[tuple[str, str | None, int]]:
    """(text, second text or None, number of the class) of each line. names: of the classes.

    Raises UserError with the number of the line that is not {"text": …, "label": …}.
    """
    examples = []
    for where, text, pair, fields in objects_of_lines(path, f'{{"text": "…", "label": "{names[0]}"}}'):
        examples.append((text, pair, class_of(fields.get("label"), names, where)))
        if limit is not None and len(examples) == limit:
            break
    if not examples:
        raise UserError(f"{path} has no lines with text and label")
    return examples


def class_of(label: Any, names: Sequence[str], where: str) -> int:
    if isinstance(label, str) and label in names:
        return list(names).index(label)
    if type(label) is int and 0 <= label < len(names):
        return label
    raise UserError(f"{where} has the label {label!r}; expected 0 to {len(names) - 1}, or one of: {', '.join(names)}")
