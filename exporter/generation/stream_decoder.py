"""Tokens to text as they arrive, in pieces that never change later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.text.tokenizer import Tokenizer

# What a tokenizer writes for bytes that are not UTF-8, such as the first bytes of a character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so at most 3 tokens may be the beginning of one.
MOST_INCOMPLETE = 3
# So many tokens without a complete character at their end are not UTF-8; they are released with replacements.
MOST_WAITING = 16


class StreamDecoder:
    """The text of a growing list of tokens, in pieces of complete characters.

    A token may end inside a character: a byte of UTF-8, or a piece of byte-level BPE. Its text waits for the rest. And
    the text of a token may depend on those before it: the first word of a text has no space before it, later ones do.
    Tokens are therefore decoded with those of the piece before. Memory does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt)
        self._written = tokenizer.decode(self._context)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete with this token; "" if the token ends inside a character."""
        self._waiting.append(token)
        text = self._tokenizer.decode([*self._context, *self._waiting])
        if not text.endswith(REPLACEMENT):
            return self._write(text, len(self._waiting))
        if len(self._waiting) < MOST_WAITING:
            return ""
        count = len(self._waiting) - MOST_INCOMPLETE
        return self._write(self._tokenizer.decode([*self._context, *self._waiting[:count]]), count)

    def end(self) -> str:
        """What is left; a character that never became complete is replaced by U+FFFD."""
        return self._write(self._tokenizer.decode([*self._context, *self._waiting]), len(self._waiting))

    def _write(self, text: str, count: int) -> str:
        """The new part of the text of the context and the first `count` waiting tokens, which become the context."""
        piece = text[len(self._written) :]
        if count:
            # a special token has no text, so it cannot tell whether a space comes next
            before = [] if piece else self._context[-MOST_WAITING:]
            self._context, self._waiting = [*before, *self._waiting[:count]], self._waiting[count:]
            self._written = self._tokenizer.decode(self._context)
        return piece
