"""Tasks: a text becomes inputs of a model, and its outputs become an answer.

At the beginning: tokens of texts, what a tokenizer has and does, and the one of byte-level encoders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from effexport.base.dtypes import joined_rows
from effexport.base.errors import UserError
from effexport.base.spec import is_optional
from effexport.models.validation import shown
from effexport.tasks.sampling import unknown_name

if TYPE_CHECKING:
    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec


# Tokens of a byte-level encoder: 0 is padding, 1 is spare and stands for a mask, and byte b is b + 2.
BYTE_MASK = 1
BYTE_OFFSET = 2


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text, or of two, as one row of the model's input.

    type_ids: segments; special: whether the tokenizer added a token, such as [CLS]; offsets: the characters that a
    token covers, of its own text; sequence: 0 for tokens of the text, 1 of the second text, None for added ones;
    words: the number of the word that a token is part of, in its own text, None where there is none.
    """

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]
    special: tuple[bool, ...]
    offsets: tuple[tuple[int, int], ...]
    sequence: tuple[int | None, ...]
    words: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_tokens(cls, ids: Iterable[int], offsets: tuple[tuple[int, int], ...] | None = None) -> Encoding:
        """Tokens of one text, of which no tokenizer has said more."""
        found = tuple(ids)
        count = len(found)
        places = tuple((i, i + 1) for i in range(count)) if offsets is None else offsets
        return cls(found, (0,) * count, (False,) * count, places, (0,) * count, (None,) * count)


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """Text → tokens → text. Thread-safe.

    vocab_size: the highest token + 1. max_length: the most tokens of a row that the tokenizer was made for, None if it
    does not say. mask_token_id and the like: None if there is no such token.
    """

    vocab_size: int
    max_length: int | None = None
    mask_token: str | None = None
    mask_token_id: int | None = None
    cls_token_id: int | None = None
    unk_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int = 0

    @abstractmethod
    def encode(self, text: str, pair: str | None = None, *, special_tokens: bool = True) -> Encoding:
        """The tokens of a text, with those of a second text after them.

        Raises UserError for a text that is not valid Unicode, or with characters that a tokenizer without a token for
        unknown ones does not know.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""

    @abstractmethod
    def token(self, token_id: int) -> str:
        """A token as the vocabulary has it, such as "##ing"."""


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer(Tokenizer):
    """The tokenizer of a byte-level encoder: every byte of the text in UTF-8 is a token."""

    vocab_size: int = 256 + BYTE_OFFSET

    def encode(self, text: str, pair: str | None = None, *, special_tokens: bool = True) -> Encoding:
        if pair is not None:
            raise UserError("a byte-level model reads one text; it has no token that could separate two")
        check_unicode(text)
        # a character of several bytes is several tokens
        places = [place for place, character in enumerate(text) for _ in character.encode()]
        return self.encode_bytes(text.encode(), tuple((place, place + 1) for place in places))

    def encode_bytes(self, data: bytes, offsets: tuple[tuple[int, int], ...] | None = None) -> Encoding:
        """The tokens of bytes that need not be a text. offsets: see Encoding; by default those of bytes."""
        return Encoding.of_tokens((byte + BYTE_OFFSET for byte in data), offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        values = [token - BYTE_OFFSET for token in ids]
        return bytes(value for value in values if 0 <= value < 256).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.decode([token_id])


def check_unicode(text: str) -> None:
    """Raise UserError for a text with half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text is not valid Unicode: character {error.start} is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair; expected text that can be written as UTF-8"
        ) from error


# Tokens of all windows of a text together, so that a large stride does not fill the memory.
MAX_WINDOW_TOKENS = 1 << 21
TOKENS, SEGMENTS = "input_ids", "token_type_ids"


@dataclass(frozen=True)
class TextOptions:
    """Options of tasks. None stands for what transformers' pipeline of the task does.

    top: how many answers: tokens for a mask (5), labels (all), spans (1). stride: tokens that neighbouring windows of a
    long text share (question-answering and token-classification: half a window, at most 128; others: none).
    max_window: tokens of a window, if not as many as the model takes (question-answering: at most 384).
    max_answer_tokens: the longest answer to a question.
    """

    top: int | None = None
    stride: int | None = None
    max_window: int | None = None
    max_answer_tokens: int = 15

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("stride", 0), ("max_window", 1), ("max_answer_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; expected at least {least}")


DEFAULT_OPTIONS = TextOptions()
TEXT_OPTIONS = tuple(field.name for field in fields(TextOptions))


def options_from_parameters(parameters: Mapping[str, Any]) -> TextOptions:
    """The options in the parameters of a request. Raises UserError for one that is unknown or cannot work."""
    for name, value in parameters.items():
        if name not in TEXT_OPTIONS:
            raise unknown_name("parameter", name, TEXT_OPTIONS)
        if type(value) is not int:
            raise UserError(f"{name} is {shown(value)}; expected an integer")
    return TextOptions(**parameters)


@dataclass(frozen=True)
class PreparedText:
    """A text as inputs of the model: one row for each window.

    windows: the tokens of each row. places: per row, where its tokens stand in `encoding`, the whole text.
    feeds: all rows, padded to the same length. alone: whether other rows, or padding, could change an answer.
    """

    text: str
    pair: str | None
    encoding: Encoding
    windows: tuple[Encoding, ...]
    places: tuple[tuple[int, ...], ...]
    feeds: Mapping[str, Array]
    alone: bool
    fixed: bool

    @property
    def runs(self) -> list[Mapping[str, Array]]:
        """Batches to run: one unpadded row each if batching could change an answer, otherwise all rows."""
        if not self.alone:
            return [self.feeds]
        lengths = [None if self.fixed else len(window) for window in self.windows]
        sequences = {name for name, value in self.feeds.items() if value.shape[1:] == self.feeds[TOKENS].shape[1:]}
        return [
            {name: array[i : i + 1, : length if name in sequences else None] for name, array in self.feeds.items()}
            for i, length in enumerate(lengths)
        ]

    def rows(self, batch: int) -> list[Mapping[str, Array]]:
        """The runs in parts of at most `batch` rows, so that memory does not grow with the text."""
        return [
            {name: array[start : start + batch] for name, array in feeds.items()}
            for feeds in self.runs
            for start in range(0, len(feeds[TOKENS]), batch)
        ]


class Task(Protocol):
    """A task of transformers' pipelines. Thread-safe: it has no state.

    name: as in transformers.pipeline(name).
    """

    @property
    def name(self) -> str: ...

    def prepare(self, text: str, pair: str | None = None) -> PreparedText:
        """The inputs of a text, or of two. Raises UserError for a text that the task or the model cannot take."""

    def answer(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Any:
        """The answer, ready for JSON, in the form of transformers' pipeline. outputs: of all rows of `prepared`."""


def joined_outputs(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several runs, one below the other; shorter rows end in zeros."""
    return {name: joined_rows([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class Reader:
    """Turns texts into the inputs of a model.

    limit: the most tokens of a row; None if any number works. length: the only number, None if it is free.
    mask: the name of the input that tells which tokens are kept, "" if there is none; kept: its value for them.
    pad_token_id: of the model.
    """

    tokenizer: Tokenizer
    inputs: tuple[str, ...]
    limit: int | None
    length: int | None
    mask: str
    kept: int
    pad_token_id: int
    alone: bool

    def whole(self, text: str, pair: str | None, task: str) -> PreparedText:
        """A text as one row. Raises UserError for one that is empty, or too long."""
        encoding = self.encode(text, pair)
        if self.limit is not None and len(encoding) > self.limit:
            raise UserError(
                f"the text has {len(encoding)} tokens; this model takes {self.limit}, and {task} needs all of them at "
                "once: shorten the text, or split it"
            )
        return self.prepared(text, pair, encoding, [tuple(range(len(encoding)))])

    def tokens(self, ids: Sequence[int]) -> PreparedText:
        """Tokens as one row, with those that the tokenizer would add if `ids` has them. Raises UserError as `whole`."""
        if self.limit is not None and len(ids) > self.limit:
            raise UserError(f"the input has {len(ids)} tokens; this model takes {self.limit}: shorten or split it")
        return self.prepared("", None, Encoding.of_tokens(ids), [tuple(range(len(ids)))])

    def split(self, text: str, pair: str | None, *, limit: int | None, stride: int, sequence: int = 0) -> PreparedText:
        """A text as windows; every row has the added tokens, and the whole of the other text.

        limit: tokens of a row, None for any number. stride: tokens that neighbouring windows share. sequence: which of
        two texts is cut.
        """
        return self.cut(text, pair, self.encode(text, pair), limit, stride, sequence)

    def cut(
        self, text: str, pair: str | None, encoding: Encoding, limit: int | None, stride: int, sequence: int = 0
    ) -> PreparedText:
        """As `split`, for tokens that have been made."""
        own = [place for place, number in enumerate(encoding.sequence) if number == sequence]
        before, after = range(own[0]), range(own[-1] + 1, len(encoding))
        limits = [number for number in (limit, self.limit) if number is not None]
        room = min(limits) - len(before) - len(after) if limits else len(own)
        if room <= stride and len(own) > room:
            raise UserError(
                f"windows of {min(limits)} tokens have room for {max(room, 0)} of a long text beside the other tokens, "
                f"and {stride} of them are to be shared; expected a smaller --stride, or a shorter question"
            )
        starts = range(0, max(len(own) - stride, 1), max(room - stride, 1)) if len(own) > room else range(1)
        total = len(starts) * (min(room, len(own)) + len(before) + len(after))
        if total > MAX_WINDOW_TOKENS:
            raise UserError(
                f"the text is {len(starts)} windows, with {total} tokens in all; expected at most {MAX_WINDOW_TOKENS}: "
                "share fewer tokens (--stride), or split the text"
            )
        rows = [(*before, *own[start : start + room], *after) for start in starts]
        return self.prepared(text, pair, encoding, rows)

    def encode(self, text: str, pair: str | None) -> Encoding:
        """The tokens of a text. Raises UserError if there are none."""
        for what, given in (("text", text), ("second text", pair)):
            if given == "":
                raise UserError(f"the {what} is empty; expected at least one character")
        encoding = self.tokenizer.encode(text, pair)
        for number, what in enumerate(("text", "second text")[: 1 if pair is None else 2]):
            if number not in encoding.sequence:
                raise UserError(f"the {what} has no tokens: the tokenizer drops all of its characters")
        return encoding

    def prepared(
        self, text: str, pair: str | None, encoding: Encoding, rows: Sequence[tuple[int, ...]]
    ) -> PreparedText:
        windows = tuple(part_of(encoding, row) for row in rows)
        length = self.length or max(map(len, windows))
        shape = (len(windows), length)
        tokens, segments = np.full(shape, self.pad_token_id, np.int64), np.zeros(shape, np.int64)
        mask = np.full(shape, 1 - self.kept, np.int64)
        for row, window in enumerate(windows):
            tokens[row, : len(window)] = window.ids
            segments[row, : len(window)] = window.type_ids
            mask[row, : len(window)] = self.kept
        found = {TOKENS: tokens, SEGMENTS: segments, self.mask: mask}
        feeds = {name: found[name] for name in self.inputs}
        return PreparedText(
            text, pair, encoding, windows, tuple(rows), feeds, self.alone or not self.mask, self.length is not None
        )


def part_of(encoding: Encoding, places: Sequence[int]) -> Encoding:
    """Some tokens of an encoding."""
    fields = (encoding.ids, encoding.type_ids, encoding.special, encoding.offsets, encoding.sequence, encoding.words)
    return Encoding(*(tuple(values[place] for place in places) for values in fields))  # type: ignore[arg-type]


def reader_from_spec(spec: BuildSpec, tokenizer: Tokenizer, *, given_by_task: Iterable[str] = ()) -> Reader:
    """Raises UserError for a model with inputs that a text does not give. given_by_task: inputs that the task gives."""
    model = spec.model
    dims = {tensor.name: tensor.dims for tensor in spec.inputs}
    read = (TOKENS, SEGMENTS, model.mask, *given_by_task)
    left_out = [tensor.name for tensor in spec.inputs if is_optional(tensor) and tensor.name not in read]
    unknown = [name for name in dims if name not in (*read, *left_out)]
    if unknown or len(dims.get(TOKENS, ())) != 2:
        inputs = ", ".join(str(tensor) for tensor in spec.inputs)
        raise UserError(f"a text cannot be the input of this model, which takes {inputs}; give arrays with --input")
    return Reader(
        tokenizer,
        tuple(name for name in dims if name not in (*given_by_task, *left_out)),
        model.fixed_seq_len or model.max_seq_len,
        model.fixed_seq_len,
        model.mask if model.mask in dims else "",
        0 if model.mask_ignores else 1,
        model.pad_token_id,
        bool(model.why_not_invariant),
    )


def softmax(logits: Array) -> Array:
    """Over the last axis, in float64."""
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def best(scores: Array, count: int) -> Array:
    """The places of the highest of a row of scores, from the highest; of equal ones, the first."""
    places: Array = np.argsort(-scores, kind="stable")[:count]
    return places
