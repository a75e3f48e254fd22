"""Options and output helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

# Columns of tables when stderr is a file or a pipe, whose width is unknown.
LOG_WIDTH = 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def stderr_console() -> Console:
    """Human text goes to stderr; stdout belongs to --json."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


@contextmanager
def stage_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner that shows the current stage on a terminal, and one line per stage elsewhere."""
    if not console.is_terminal:
        yield lambda name: console.print(f"… {name}", markup=False)
        return
    from rich.markup import escape

    with console.status("starting") as status:
        yield lambda name: status.update(escape(name))
