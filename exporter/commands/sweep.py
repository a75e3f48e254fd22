"""`effexport sweep`."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from effexport.commands._options import result_console, stderr_console, time_left
from effexport.commands._progress import bar_column, bars_of, clock_column, text_column
from effexport.commands._sweep_request import SweepRequest
from effexport.commands._verbs import verb
from effexport.one_line import say
from effexport.shell import Word, command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from effexport.bench.store import Store
    from effexport.bench.sweep import Progress, SweepPlan, SweepResults

INTERRUPTED = 130
MESSAGES = "ray.log"


@verb("sweep", SweepRequest)
def command(request: SweepRequest, as_json: bool) -> None:
    """Build every combination in SWEEP.toml: variants × lengths × precisions × targets × GPUs.

    The file format is described in docs/sweep.md. The combinations (cells) run in parallel, with Ray if it is
    installed. Running an interrupted sweep again resumes it; finished cells are never rebuilt, and a cell that fails
    does not stop the others.
    """
    plan, store = request.resolve()
    if request.dry_run:
        show_plan(plan, store, as_json=as_json)
        return
    console = stderr_console()
    results, complete = run(request, plan, store, console)
    show_results(store, results, as_json=as_json)
    if not complete:
        say(console, "Interrupted; run the same command again to resume.", "yellow")
        raise click.exceptions.Exit(INTERRUPTED)
    asked = {cell.id for cell in request.chosen(plan.cells)}
    if any(row.status != "finished" for row in results.rows if row.id in asked):
        raise click.exceptions.Exit(1)


def run(request: SweepRequest, plan: SweepPlan, store: Store, console: Console) -> tuple[SweepResults, bool]:
    """Run the cells of the plan and write the result files, also after an interrupt."""
    import time

    from effexport.bench.sweep import Sweep, results_of_sweep, write_results
    from effexport.disk import write_error

    started, complete, where = time.monotonic(), True, ""
    sweep = None
    with ExitStack() as stack:
        executor = None
        if plan.to_run:
            # before anything is written, so that a bad address is the only message
            executor = stack.enter_context(closing(request.executor(console)))
        stack.enter_context(store.opened())
        say_plan(console, plan, store, request)
        if executor is not None:
            where = executor.title
            say(console, f"running on {where}")
            # closed here, because what runs writes into the folder that `opened` clears
            with closing(executor), messages_of_ray(store), sweep_progress(console) as on_progress:
                sweep = Sweep(store, executor, on_progress)
                try:
                    sweep.run(plan.to_run)
                except KeyboardInterrupt:
                    complete = False
                except OSError as error:
                    raise write_error(store.path, error, "move the folder; finished cells are kept") from error
        results = results_of_sweep(
            plan,
            store,
            sweep,
            name=request.sweep_file.stem,
            command=request.command,
            command_of_cell=command_of_cell(request),
            where=where,
            seconds=round(time.monotonic() - started, 3),
            complete=complete,
        )
        write_results(results, store.path)
    return results, complete


@contextmanager
def messages_of_ray(store: Store) -> Iterator[None]:
    """Redirect what Ray prints about nodes to a file, because stdout is for --json."""
    path = store.path / MESSAGES
    with path.open("a", encoding="utf-8") as stream, redirect_stdout(stream):
        yield
    if not path.stat().st_size:
        path.unlink()


def say_plan(console: Console, plan: SweepPlan, store: Store, request: SweepRequest) -> None:
    from effexport.units import counted

    states = [plan.states[cell.id] for cell in plan.cells]
    parts = [f"{states.count('finished')} finished before", f"{len(plan.to_run)} to run"]
    failed = sum(plan.states[cell.id] == "failed" for cell in plan.cells if cell not in plan.to_run)
    if failed:
        parts.append(f"{failed} failed before (skipped; --retry-failed runs them again)")
    say(console, f"{request.sweep_file}: {counted(len(states), 'cell')}, {', '.join(parts)}")
    for cell in plan.to_run:
        damage = store.damage(cell)
        if damage:
            say(console, f"note: {cell.id} is rebuilt: {damage}", style="yellow")


def command_of_cell(request: SweepRequest) -> Callable[[str], str]:
    """A function from the id of a cell to the command that runs only this cell."""
    words: list[Word] = ["effexport", "sweep", request.sweep_file, "-o", request.folder]
    if request.address is not None:
        words.append(("--address", request.address))
    return lambda name: command_line(*words, ("--only", name))


def show_plan(plan: SweepPlan, store: Store, *, as_json: bool) -> None:
    """Print every cell with its hash, and whether it would run."""
    from effexport.cli import print_json
    from effexport.render.document import Column, Line, Table
    from effexport.render.terminal import print_part

    to_run = {cell.id for cell in plan.to_run}
    if as_json:
        cells = [
            {
                "id": cell.id,
                "digest": cell.digest,
                "title": cell.title,
                "state": plan.states[cell.id],
                "would_run": cell.id in to_run,
                "spec": cell.spec.to_dict(),
            }
            for cell in plan.cells
        ]
        print_json({"output": str(store.path), "would_run": len(to_run), "cells": cells})
    columns = (Column("name (ends with the hash)"), Column("cell"), Column("state", is_status=True))
    lines = []
    for cell in plan.cells:
        state = plan.states[cell.id]
        again = state == "failed" and cell.id in to_run
        lines.append(Line((cell.id, cell.title, "would run again" if again else state)))
    console = result_console(as_json=as_json)
    print_part(console, Table("Cells", columns, tuple(lines)))
    finished = sum(state == "finished" for state in plan.states.values())
    say(console, f"{len(plan.cells)} cells, {finished} finished, {len(to_run)} would run")


def show_results(store: Store, results: SweepResults, *, as_json: bool) -> None:
    import json

    from effexport.bench.sweep import CSV, JSON, PAGE, document_from_results
    from effexport.cli import print_json
    from effexport.render.terminal import print_document

    if as_json:
        print_json({"output": str(store.path)} | json.loads(results.to_json()))
    console = result_console(as_json=as_json)
    print_document(console, document_from_results(results))
    say(console, f"Written: {', '.join(str(store.path / name) for name in (JSON, CSV, PAGE))}")


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
