"""Texts that may quote anything, such as the name of a file, on one line of a terminal."""

from __future__ import annotations


def one_line(text: str) -> str:
    """A text in which line feeds, escape sequences and marks that turn its direction can be seen and do nothing."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
