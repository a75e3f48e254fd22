"""What `effexport build` understands of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from effexport.cli import cli
from effexport.commands.build import command
from effexport.option_fields import options_of
from effexport.options import BuildOptions


def options_from_words(words: Sequence[str]) -> BuildOptions:
    """The options that the words after `effexport build` give."""
    given = command.make_context("build", list(words), **cli.context_settings).params
    known = options_of(BuildOptions)
    return BuildOptions(**{name: value for name, value in given.items() if name in known and value not in (None, ())})
