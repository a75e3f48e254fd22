"""Tokens of texts: what a tokenizer has and does, and the one of byte-level encoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from effexport.base.errors import UserError

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


def check_unicode(text: str) -> None:
    """Raise UserError for a text with half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text is not valid Unicode: character {error.start} is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair; expected text that can be written as UTF-8"
        ) from error
