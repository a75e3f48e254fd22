"""Output helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from effexport.base.formatting import one_line, rough_duration, say
from effexport.plugins.ops import with_domain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

    from effexport.bench.grid import Step

# Columns of tables when the output is a file or a pipe, whose width is unknown.
LOG_WIDTH = 130


def implementation_text(implementation: Mapping[str, str], verb: str = "ran as") -> str:
    """The end of a sentence that says how the custom operators ran; empty for a model without any."""
    if not implementation:
        return ""
    parts = [f"{with_domain(op)} {'was' if what == 'not run' else verb} {what}" for op, what in implementation.items()]
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


@contextmanager
def step_progress(
    console: Console, line_of: Callable[[Step], str], *, of_cells: bool = False
) -> Iterator[Callable[[Step], None]]:
    """Yield a function that shows each step: on a terminal in a bar with the time left, elsewhere as a line, once if
    several have the same. of_cells: they are counted, and each has a line above the bar as well."""
    last = ""

    def print_line(step: Step) -> None:
        nonlocal last
        if (line := line_of(step)) != last:
            say(console, line)
        last = line

    if not console.is_terminal:
        yield print_line
        return
    fields = (text_column("{task.fields[left]}"), text_column("{task.description}"))
    columns = (bar_column(), still_column("{task.fields[amount]}"), clock_column(), *fields)
    with bars_of(console, *columns, redirect_stdout=not of_cells) as bars:
        task = bars.add_task("starting", total=None, amount="", left="")

        def show(step: Step) -> None:
            amount = f"{step.done}/{step.total}" if of_cells else f"{100 * step.done / step.total:>3.0f} %"
            text, left = f"{step.running} running" if of_cells else step.text, time_left(step.seconds_left)
            bars.update(task, total=step.total, completed=step.done, description=text, amount=amount, left=left)
            if of_cells:
                say(bars.console, step.text)

        yield show


def bars_of_stages(console: Console) -> Progress:
    """A spinner and the time for each stage, and a bar for stages that report steps."""
    from rich.progress import SpinnerColumn

    stage, phase = text_column("{task.description}"), text_column("{task.fields[phase]}", "dim")
    return bars_of(console, SpinnerColumn(), stage, bar_column(), phase, clock_column())


def bars_of(console: Console, *columns: ProgressColumn, redirect_stdout: bool = True) -> Progress:
    """Bars whose clock stays on the line, however narrow the terminal is and however long the texts are."""
    from rich.progress import Progress

    return Progress(*columns, console=console, transient=True, redirect_stdout=redirect_stdout)


def text_column(form: str, style: str = "none") -> ProgressColumn:
    """A text of a task as it is, cut off where a line is too short. form: as `str.format` takes it."""
    from rich.progress import TextColumn
    from rich.table import Column

    class Shortened(TextColumn):
        def render(self, task: Task) -> Text:
            text = super().render(task)
            text.no_wrap, text.overflow = True, "ellipsis"
            return text

    # rich makes columns that may wrap narrower before it does any other
    return Shortened(form, style=style, markup=False, table_column=Column(min_width=1))


def still_column(form: str) -> ProgressColumn:
    """A short text of a task that no long text pushes off the line."""
    from rich.progress import TextColumn
    from rich.table import Column

    return TextColumn(form, markup=False, table_column=Column(no_wrap=True))


def bar_column() -> ProgressColumn:
    """A bar that is hidden for a task that reports no steps."""
    from rich.progress import BarColumn

    class BarOfSteps(BarColumn):
        def render(self, task: Task) -> Any:
            return super().render(task) if task.total is not None else ""

    return BarOfSteps(bar_width=24)


def clock_column() -> ProgressColumn:
    """The time that a stage has taken, which no long text pushes off the line."""
    from rich.progress import TimeElapsedColumn
    from rich.table import Column

    return TimeElapsedColumn(table_column=Column(no_wrap=True))
