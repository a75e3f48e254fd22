"""Texts that may quote anything, such as the name of a file, on one line of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def one_line(text: str) -> str:
    """A text in which line feeds, escape sequences and marks that turn its direction can be seen and do nothing."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as one line that can be copied, whatever markup it seems to have."""
    console.print(one_line(text), style=style, markup=False, emoji=False, soft_wrap=True)
