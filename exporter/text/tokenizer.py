"""Tokenizers of artifacts: their own tokenizer files, or the bytes of a byte-level encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from effexport.artifact import Artifact
from effexport.errors import UserError
from effexport.text.fast_tokenizer import TOKENIZER_FILES, TOKENIZER_JSON, FastTokenizer, fast_tokenizer

# Tokens of a byte-level encoder: 0 is padding, 1 is spare and stands for a mask, and byte b is b + 2.
BYTE_MASK = 1
BYTE_OFFSET = 2
NO_TOKENS = "build it with the tokenizer of the model: effexport build … --tokenizer DIR"


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


class Tokenizer(Protocol):
    """Text → tokens → text. Thread-safe.

    vocab_size: the highest token + 1. max_length: the most tokens of a row that the tokenizer was made for, None if it
    does not say. mask_token_id and the like: None if there is no such token.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int | None: ...

    @property
    def mask_token(self) -> str | None: ...

    @property
    def mask_token_id(self) -> int | None: ...

    @property
    def cls_token_id(self) -> int | None: ...

    @property
    def unk_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int: ...

    def encode(self, text: str, pair: str | None = None, *, special_tokens: bool = True) -> Encoding:
        """The tokens of a text, with those of a second text after them.

        Raises UserError for a text that is not valid Unicode, or with characters that a tokenizer without a token for
        unknown ones does not know.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""

    def token(self, token_id: int) -> str:
        """A token as the vocabulary has it, such as "##ing"."""


class ArtifactTokenizer:
    """A tokenizer of the `tokenizers` library with the settings of the artifact's files."""

    def __init__(self, fast: FastTokenizer, pad_token_id: int) -> None:
        """pad_token_id: of the model, for a tokenizer without a padding token."""
        self._fast = fast
        self.vocab_size = fast.vocab_size
        self.max_length = fast.max_length
        self.mask_token = fast.special("mask_token")
        self.mask_token_id = fast.special_id("mask_token")
        self.cls_token_id = fast.special_id("cls_token")
        self.unk_token_id = fast.special_id("unk_token")
        self.eos_token_id = fast.special_id("eos_token")
        own = fast.special_id("pad_token")
        self.pad_token_id = pad_token_id if own is None else own

    def encode(self, text: str, pair: str | None = None, *, special_tokens: bool = True) -> Encoding:
        check_unicode(text)
        check_unicode(pair or "")
        given = text if pair is None else (text, pair)
        try:
            # unlike `encode`, this lets other threads run
            (found,) = self._fast.tokenizer.encode_batch([given], add_special_tokens=special_tokens)
        except BaseException as error:
            # the library raises Exception itself, and for its own defects an error that is not an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"the tokenizer cannot read this text: {error}") from error
        return Encoding(
            tuple(found.ids),
            tuple(found.type_ids) if self._fast.has_type_ids else (0,) * len(found.ids),
            tuple(map(bool, found.special_tokens_mask)),
            tuple(found.offsets),
            tuple(found.sequence_ids),
            tuple(found.word_ids),
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        return str(self._fast.tokenizer.id_to_token(token_id))


@dataclass(frozen=True)
class ByteTokenizer:
    """The tokenizer of a byte-level encoder: every byte of the text in UTF-8 is a token."""

    vocab_size: int = 256 + BYTE_OFFSET
    max_length: int | None = None
    mask_token: str | None = None
    mask_token_id: int | None = None
    cls_token_id: int | None = None
    unk_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int = 0

    def encode(self, text: str, pair: str | None = None, *, special_tokens: bool = True) -> Encoding:
        if pair is not None:
            raise UserError("a byte-level model reads one text; it has no token that could separate two")
        check_unicode(text)
        # a character of several bytes is several tokens
        places = [place for place, character in enumerate(text) for _ in character.encode()]
        return self.encode_bytes(text.encode(), tuple((place, place + 1) for place in places))

    def encode_bytes(self, data: bytes, offsets: tuple[tuple[int, int], ...] | None = None) -> Encoding:
        """The tokens of bytes that need not be a text. offsets: see Encoding; by default those of bytes."""
        count = len(data)
        return Encoding(
            tuple(byte + BYTE_OFFSET for byte in data),
            (0,) * count,
            (False,) * count,
            tuple((i, i + 1) for i in range(count)) if offsets is None else offsets,
            (0,) * count,
            (None,) * count,
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        values = [token - BYTE_OFFSET for token in ids]
        return bytes(value for value in values if 0 <= value < 256).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.decode([token_id])


def tokenizer_from_artifact(artifact: Artifact) -> Tokenizer:
    """The tokenizer of an artifact: from its files, or of bytes for a byte-level encoder without any.

    Raises UserError if the artifact does not read text, MissingExtraError without the package tokenizers.
    """
    model = artifact.spec.model
    if TOKENIZER_JSON in artifact.manifest.files:
        return ArtifactTokenizer(fast_tokenizer(artifact.path), model.pad_token_id)
    if model.reads_bytes and model.input_limits["input_ids"] >= 256 + BYTE_OFFSET:
        return ByteTokenizer(pad_token_id=model.pad_token_id)
    if "input_ids" not in model.inputs:
        raise UserError(
            f"{artifact.path} does not read text: its inputs are {', '.join(model.inputs)}; give arrays with --input"
        )
    if any(name in artifact.manifest.files for name in TOKENIZER_FILES):
        raise UserError(
            f"{artifact.path} has the tokenizer in files that need transformers; build it again with transformers "
            f"installed, which converts them to {TOKENIZER_JSON}"
        )
    raise UserError(f"{artifact.path} has no tokenizer; {NO_TOKENS}")


def check_unicode(text: str) -> None:
    """Raise UserError for a text with half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text is not valid Unicode: character {error.start} is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair; expected text that can be written as UTF-8"
        ) from error
