"""Commands that are shown: one line each, with words that a shell reads as they are, and no name as an option."""

from __future__ import annotations

import shlex
from pathlib import Path

# A word of the command itself, a path, or an option with its value. Names of files and values may be anybody's.
Word = str | Path | tuple[str, object]


def command_line(*words: Word) -> str:
    """`effexport verify "my artifact"`: a command for any shell, in one line."""
    return " ".join(text for word in words for text in _texts(word))


def _texts(word: Word) -> tuple[str, ...]:
    if isinstance(word, str):
        return (quoted(word),)
    if isinstance(word, Path):
        return (quoted(str(word) if not str(word).startswith("-") else f"./{word}"),)
    option, value = word
    # joined, so that nobody takes the value for another option
    return (quoted(f"{option}={value}"),) if str(value).startswith("-") else (option, quoted(str(value)))


def quoted(word: str) -> str:
    """In double quotes where that is enough, which is easier to read and works on Windows too; characters that control
    a terminal, such as line feeds, are written as bash and zsh read them."""
    if not word.isprintable():
        return f"$'{''.join(map(_escaped, word))}'"
    if word == shlex.quote(word) or set(word) & set('"$`\\!'):
        return shlex.quote(word)
    return f'"{word}"'


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    # a byte of a name that is not UTF-8, or half of a sign in JSON
    errors = "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in sign.encode("utf-8", errors))
