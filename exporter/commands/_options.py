"""Options and output helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._progress import bars_of_stages
from effexport.commands._types import Named, OneOf
from effexport.one_line import one_line, say
from effexport.runners.options import IMPLEMENTATIONS
from effexport.runtimes import ARTIFACT_RUNTIMES, DEFAULT_RUNTIME, Runtime, described
from effexport.shell import Word, command_line
from effexport.units import rough_duration, tokens_from_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

# Columns of tables when the output is a file or a pipe, whose width is unknown.
LOG_WIDTH = 130


def length_option(name: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for a length in tokens, such as 512 or 32k. Text of another form raises UserError."""

    def length(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
        return None if text is None else tokens_from_text(text, name)

    return click.option(name, metavar="LENGTH", callback=length, help=help)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --json and --debug to a command; `cli.fail` reads --debug itself."""
    json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; text goes to stderr.")
    debug = click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        help="Show the traceback of an error, and what PyTorch prints while it traces a model.",
    )
    return json(debug(command))


def runtime_options(runtimes: Mapping[str, Runtime]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add --runtime, with a choice of these, --implementation and --device to a command."""
    runtime = click.option(
        "--runtime",
        type=OneOf(runtimes),
        default=DEFAULT_RUNTIME,
        show_default=True,
        help=f"Where the model runs. {described(runtimes)}.",
    )
    implementation = click.option(
        "--implementation",
        type=Named(IMPLEMENTATIONS),
        default="auto",
        show_default=True,
        help="How custom operators run in ONNX Runtime: as kernels, as function bodies, or auto: as kernels if these "
        "are built and not expected to be slower. For single operators: LSHSort=body,….",
    )
    device = click.option(
        "--device", type=int, default=0, show_default=True, help="Which GPU runs the model, for ort-cuda and ort-trt."
    )
    return lambda command: runtime(implementation(device(command)))


def precision_hint_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add --precision-hint to a command that runs artifacts."""
    able = ", ".join(name for name, runtime in ARTIFACT_RUNTIMES.items() if runtime.precision_hints)
    hints = dict.fromkeys(hint for runtime in ARTIFACT_RUNTIMES.values() for hint in runtime.precision_hints)
    hint = click.option(
        "--precision-hint",
        type=Named(hints),
        default="",
        help=f"Compute in this precision, whatever the model's: bf16, in {able}, where the CPU supports it.",
    )
    return hint(command)


def implementation_text(implementation: Mapping[str, str], verb: str = "ran as") -> str:
    """The end of a sentence that says how the custom operators ran; empty for a model without any."""
    if not implementation:
        return ""
    parts = [f"effexport::{op} {'was' if what == 'not run' else verb} {what}" for op, what in implementation.items()]
    return f", {', '.join(parts)}"


def stderr_console() -> Console:
    """The console for progress, notes on the way and warnings."""
    return _console(stderr=True)


def result_console(*, as_json: bool = False) -> Console:
    """The console for results: stdout, or stderr if stdout is for the object of --json."""
    return _console(stderr=as_json)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    # names and paths may have [brackets] or :colons: in them, also in tables
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def cell(text: object, style: str = "") -> Text:
    """A cell of a table, as `say` prints text."""
    from rich.text import Text

    return Text(one_line(str(text)), style)


def repeated(context: click.Context) -> str:
    """The command as the user gave it, quoted for a shell."""
    words: list[Word] = ["effexport", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        for one in value if parameter.multiple else [value]:
            if not isinstance(parameter, click.Option):
                words.append(Path(one))
            elif parameter.is_flag:
                words.append(parameter.opts[-1])
            else:
                words.append((parameter.opts[-1], one))
    return command_line(*words)


def time_left(seconds: float | None) -> str:
    """`about 3 min left`; empty if unknown."""
    return "" if seconds is None else f"about {rough_duration(seconds)} left"


class StageProgress:
    """Shows the running stage: call it with the stage's name; `step` reports the progress of a long stage.

    On a terminal it is a spinner, with a bar for stages that report steps; elsewhere it prints one line per stage.
    """

    def __init__(self, console: Console, bars: Progress | None) -> None:
        self._console = console
        self._bars = bars
        self._task = bars.add_task("starting", total=None, phase="") if bars else None

    def __call__(self, name: str, share: float | None = None) -> None:
        """name: of the stage that begins; with a share, what a long stage is doing, and how much of that is done."""
        if share is not None:
            self.step(name, share)
        elif self._bars is None or self._task is None:
            say(self._console, f"… {name}")
        else:
            self._bars.reset(self._task, total=None, description=one_line(name), phase="")

    def step(self, phase: str, share: float) -> None:
        """phase: what the stage is doing; share: how much of that is done, 0 to 1."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=1.0, completed=share, phase=phase)


@contextmanager
def stage_progress(console: Console) -> Iterator[StageProgress]:
    """Yield the object to which a command reports its stages."""
    if not console.is_terminal:
        yield StageProgress(console, None)
        return
    with bars_of_stages(console) as bars:
        yield StageProgress(console, bars)
