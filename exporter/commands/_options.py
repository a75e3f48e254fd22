"""Options and output helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.runners.ort_session import OrtSettings

# Columns of tables when stderr is a file or a pipe, whose width is unknown.
LOG_WIDTH = 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def runtime_options(command: Callable[..., None]) -> Callable[..., None]:
    """--runtime and --implementation."""
    command = click.option(
        "--implementation",
        default="auto",
        show_default=True,
        help="Of custom operators: kernel, body, or auto: kernels where the library is built.",
    )(command)
    return click.option(
        "--runtime", default="ort", show_default=True, help="ort: ONNX Runtime on the CPU. ort-cuda: on an NVIDIA GPU."
    )(command)


def settings_from_options(runtime: str, implementation: str) -> OrtSettings:
    """Raises UserError for an unknown name."""
    from effexport.runners.ort_session import IMPLEMENTATIONS, RUNTIMES, OrtSettings

    check_choice("--runtime", runtime, RUNTIMES)
    check_choice("--implementation", implementation, IMPLEMENTATIONS)
    return OrtSettings(provider=RUNTIMES[runtime], implementation=implementation)


def check_choice(option: str, value: str, known: Collection[str]) -> None:
    from effexport.errors import UserError
    from effexport.models.validation import did_you_mean

    if value not in known:
        raise UserError(f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")


def implementation_text(implementation: Mapping[str, str]) -> str:
    """What ran the custom operators, as the end of a sentence; nothing for a model without any."""
    if not implementation:
        return ""
    return ", " + ", ".join(f"effexport::{op} ran as {what}" for op, what in implementation.items())


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
