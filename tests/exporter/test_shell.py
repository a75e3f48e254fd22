"""Commands that are shown: whatever a name is, a shell reads it as one word, and effexport as no option."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command_lines import words_in_bash

from effexport.base.formatting import command_line, quoted

PLAIN = (
    "plain",
    "two words",
    "$HOME",
    'a "quote"',
    "it's",
    "",
    "back`tick`",
    "!x",
    "a;b",
    "~",
    "*",
    "#x",
    "a=b",
    "é 😀",
)
# Line feeds and returns, sequences for a terminal, marks that turn the direction of a text, bytes that are no UTF-8.
CONTROLLING = (
    "a\nb",
    "a\r\nb'c\\",
    "\x1b[2J",
    "\x9b31m",
    "\u202edcba",
    "\u2028",
    "\t",
    "\x7f",
    "\udcff",
    "\x0a0",
    "'\n'",
)


@pytest.mark.parametrize("word", PLAIN)
def test_words_survive_the_shell(word: str) -> None:
    assert shlex.split(quoted(word)) == [word]
    assert words_in_bash(f"x {quoted(word)}") == ["x", word]


@pytest.mark.parametrize("word", CONTROLLING)
def test_signs_that_control_a_terminal_are_written_for_the_shell(word: str) -> None:
    assert quoted(word).isprintable()
    assert words_in_bash(f"x {quoted(word)}") == ["x", word]


@pytest.mark.parametrize("name", ["--force", "-", "-o", "--\n"])
def test_neither_a_path_nor_a_value_becomes_an_option(name: str) -> None:
    line = command_line("effexport", "verify", Path(name), ("--model", name), "-o", Path(name))
    assert words_in_bash(line) == ["effexport", "verify", f"./{name}", f"--model={name}", "-o", f"./{name}"]
