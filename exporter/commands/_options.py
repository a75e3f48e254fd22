"""Options and output helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from effexport.runtimes import ARTIFACT_RUNTIMES, ORT_RUNTIMES, described

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task

    from effexport.runners.ort.session import OrtSettings

# Columns of tables when stderr is a file or a pipe, whose width is unknown.
LOG_WIDTH = 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


def runtime_options(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """--runtime, with what it means here, and --implementation."""
    runtime = click.option("--runtime", default="ort", show_default=True, help=help)
    implementation = click.option(
        "--implementation",
        default="auto",
        show_default=True,
        help="Of custom operators in ONNX Runtime: kernel, body, or auto: kernels where the library is built.",
    )
    return lambda command: runtime(implementation(command))


ORT_HELP = f"What runs the model. {described(ORT_RUNTIMES)}."
ENGINE_HELP = f"What runs the model. {described(ARTIFACT_RUNTIMES)}."


def settings_from_options(runtime: str, implementation: str) -> OrtSettings:
    """Raises UserError for an unknown name."""
    from effexport.runners.ort.session import IMPLEMENTATIONS, OrtSettings

    check_choice("--runtime", runtime, ORT_RUNTIMES)
    check_choice("--implementation", implementation, IMPLEMENTATIONS)
    return OrtSettings(provider=ORT_RUNTIMES[runtime].provider, implementation=implementation)


def check_choice(option: str, value: str, known: Collection[str]) -> None:
    from effexport.errors import UserError
    from effexport.models.validation import did_you_mean

    if value not in known:
        raise UserError(f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")


def implementation_text(implementation: Mapping[str, str], verb: str = "ran as") -> str:
    """What ran the custom operators, as the end of a sentence; nothing for a model without any."""
    if not implementation:
        return ""
    said = [f"effexport::{op} {'was' if what == 'not run' else verb} {what}" for op, what in implementation.items()]
    return f", {', '.join(said)}"


def stderr_console() -> Console:
    """Human text goes to stderr; stdout belongs to --json."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


class StageProgress:
    """Says which stage runs: call it with the stage's name; `step` reports how far a long stage is.

    On a terminal a spinner, and a bar for stages that report steps; elsewhere one line per stage.
    """

    def __init__(self, console: Console, bars: Progress | None) -> None:
        self._console = console
        self._bars = bars
        self._task = bars.add_task("starting", total=None, phase="") if bars else None

    def __call__(self, name: str) -> None:
        if self._bars is None or self._task is None:
            self._console.print(f"… {name}", markup=False)
        else:
            self._bars.reset(self._task, total=None, description=name, phase="")

    def step(self, phase: str, share: float) -> None:
        """phase: what the stage is doing; share: how much of that is done, 0 to 1."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=1.0, completed=share, phase=phase)


@contextmanager
def stage_progress(console: Console) -> Iterator[StageProgress]:
    """What a command reports its stages to."""
    if not console.is_terminal:
        yield StageProgress(console, None)
        return
    with progress_bars(console) as bars:
        yield StageProgress(console, bars)


def progress_bars(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    class BarOfSteps(BarColumn):
        """Only for stages that say how far they are."""

        def render(self, task: Task) -> Any:
            return super().render(task) if task.total is not None else ""

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarOfSteps(bar_width=24),
        TextColumn("{task.fields[phase]}", markup=False, style="dim"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
