"""The words of a command line as `effexport build` reads them."""

from __future__ import annotations

from collections.abc import Sequence

from effexport.base.option_fields import options_of
from effexport.cli.build import command
from effexport.cli.main import cli
from effexport.options import BuildOptions


def options_from_words(words: Sequence[str]) -> BuildOptions:
    """The options that the words after `effexport build` give."""
    given = command.make_context("build", list(words), **cli.context_settings).params
    known = options_of(BuildOptions)
    return BuildOptions(**{name: value for name, value in given.items() if name in known and value not in (None, ())})
