"""Progress bars whose clock stays on the line, however narrow the terminal and however long the texts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task


def bars_of_stages(console: Console) -> Progress:
    """A spinner and the time for each stage, and a bar for stages that report steps."""
    from rich.progress import SpinnerColumn

    stage, phase = text_column("{task.description}"), text_column("{task.fields[phase]}", "dim")
    return bars_of(console, SpinnerColumn(), stage, bar_column(), phase, clock_column())


def bars_of(console: Console, *columns: ProgressColumn, redirect_stdout: bool = True) -> Progress:
    from rich.progress import Progress

    return Progress(*columns, console=console, transient=True, redirect_stdout=redirect_stdout)


def text_column(form: str, style: str = "none") -> ProgressColumn:
    """A text of a task as it is, cut off where a line is too short. form: as `str.format` takes it."""
    from rich.progress import TextColumn
    from rich.table import Column
    from rich.text import Text

    class Shortened(TextColumn):
        def render(self, task: Task) -> Text:
            text = super().render(task)
            text.no_wrap, text.overflow = True, "ellipsis"
            return text

    # rich makes columns that may wrap narrower before it does any other
    return Shortened(form, style=style, markup=False, table_column=Column(min_width=1))


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
