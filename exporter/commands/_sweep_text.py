"""Plan, progress and results of a sweep as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.commands._options import cell, say, time_left
from effexport.commands._progress import bar_column, bars_of, clock_column, text_column
from effexport.units import duration, memory, number

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.bench.sweep import Plan, Progress, Row, SweepResults

STYLES = {"finished": "green", "failed": "bold red", "not run": "yellow", "to run": ""}
# Lines of a failed cell's log that are printed; the folder has the whole log.
LOG_LINES = 8
WORDS = ("cell", "precision", "target", "gpu", "state", "parity")
FIGURES = ("worst error", "time", "model")


def print_plan(console: Console, plan: Plan) -> None:
    """Print every cell with its hash, and whether it would run."""
    from rich.table import Table

    table = Table("name (ends with the hash)", "cell", "state", box=None, pad_edge=False)
    to_run = {cell.id for cell in plan.to_run}
    for one in plan.cells:
        state = plan.states[one.id]
        text = "would run again" if state == "failed" and one.id in to_run else state
        table.add_row(cell(one.id), cell(one.title), cell(text, STYLES[state]))
    console.print(table)
    finished = sum(state == "finished" for state in plan.states.values())
    say(console, f"{len(plan.cells)} cells, {finished} finished, {len(to_run)} would run")


@contextmanager
def sweep_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that prints a line per event; on a terminal also a bar with the time left."""
    if not console.is_terminal:

        def print_progress(progress: Progress) -> None:
            left = time_left(progress.seconds_left)
            say(console, f"[{progress.done}/{progress.total}{left and f', {left}'}] {progress.text}")

        yield print_progress
        return
    from rich.progress import MofNCompleteColumn
    from rich.table import Column

    count = MofNCompleteColumn(table_column=Column(no_wrap=True))
    columns = (bar_column(), count, clock_column(), text_column("{task.description}"))
    with bars_of(console, *columns, redirect_stdout=False) as bars:
        task = bars.add_task("", total=None)

        def show(progress: Progress) -> None:
            running = f"{progress.running} running {time_left(progress.seconds_left)}"
            bars.update(task, total=progress.total, completed=progress.done, description=running)
            say(bars.console, progress.text)

        yield show


def print_rows(console: Console, results: SweepResults, folder: Path) -> None:
    """Print a table of all cells; below it, each cell that failed or did not run, with reason and command."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    has_gpus, has_engines = any(row.gpu for row in results.rows), any(row.engine for row in results.rows)
    for title in WORDS:
        if title != "gpu" or has_gpus:
            table.add_column(title, no_wrap=True)
    for title in FIGURES:
        table.add_column(title, justify="right", no_wrap=True)
    if has_engines:
        table.add_column("engine")
    for row in results.rows:
        words = [f"{row.label}, {row.seq_len} tokens", row.precision, row.target, *([row.gpu] if has_gpus else [])]
        table.add_row(
            *map(cell, words),
            cell(row.status, STYLES[row.status]),
            row.parity or "–",
            number(row.worst_error),
            duration(None if row.seconds is None else row.seconds * 1000),
            memory(row.model_bytes),
            *([engine_text(row)] if has_engines else []),
        )
    console.print(table)
    for row in results.rows:
        if row.status != "finished":
            print_problem(console, row)
    paths = ", ".join(str(folder / name) for name in ("results.json", "results.csv", "report.html"))
    say(console, f"{results.sentence}. Written: {paths}")


def engine_text(row: Row) -> str:
    return f"{row.engine}, run: {row.engine_parity}" if row.engine else "–"


def print_problem(console: Console, row: Row) -> None:
    say(console, f"{row.title}: {row.status}", style=STYLES[row.status])
    for line in row.reason.splitlines():
        say(console, f"  {line}")
    for line in row.log_tail.splitlines()[-LOG_LINES:]:
        say(console, f"  | {line}", style="dim")
    say(console, f"  to run this cell only: {row.command}")
