"""The part of protocol buffers' text format that a model configuration needs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

INDENT = "  "


class Word(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


# The fields of a message in order; a value is text, a number, a bool, a Word, a tuple of these, or a message. A
# repeated field has one entry for each value.
Message = list[tuple[str, Any]]


def text_from_message(message: Message) -> str:
    return "\n".join(lines_of(message)) + "\n"


def lines_of(message: Message, indent: str = "") -> Iterator[str]:
    for name, value in message:
        if isinstance(value, list) and value:
            yield f"{indent}{name} {{"
            yield from lines_of(value, indent + INDENT)
            yield f"{indent}}}"
        elif isinstance(value, list):
            yield f"{indent}{name} {{ }}"
        else:
            yield f"{indent}{name}: {text_of(value)}"


def text_of(value: object) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    return str(value)


def quoted(text: str) -> str:
    """A quoted string; bytes of its UTF-8 form that are not printable ASCII become octal escapes."""
    escapes = {ord("\\"): "\\\\", ord('"'): '\\"'}
    return '"' + "".join(escapes.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode()) + '"'


def comment(text: str, width: int = 116) -> str:
    """Lines of a comment."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, width, break_long_words=False))
