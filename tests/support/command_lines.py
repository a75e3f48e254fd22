"""Command lines that effexport shows: their words as bash reads them, and their options as `effexport build` does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from effexport.base.option_fields import options_of
from effexport.cli.artifacts import build_command
from effexport.cli.main import cli
from effexport.options import BuildOptions


def words_in_bash(line: str) -> list[str]:
    """Of a command in one line, whose program is replaced by one that prints its words. Names are bytes in UTF-8."""
    assert "\n" not in line
    program, _, rest = line.partition(" ")
    script = f"shown() {{ printf '%s\\0' \"$@\"; }}; shown {program} {rest}"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, check=True, timeout=60)
    assert not done.stderr
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def options_from_words(words: Sequence[str]) -> BuildOptions:
    """The options that the words after `effexport build` give."""
    given = build_command.make_context("build", list(words), **cli.context_settings).params
    known = options_of(BuildOptions)
    return BuildOptions(**{name: value for name, value in given.items() if name in known and value not in (None, ())})
