"""`effexport bench`."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.bench.grid import Grid
from effexport.commands._bench_request import BenchRequest
from effexport.commands._console import (
    bar_column,
    bars_of,
    clock_column,
    result_console,
    stderr_console,
    text_column,
    time_left,
)
from effexport.commands._verbs import verb
from effexport.environment import require_torch
from effexport.errors import InterruptError
from effexport.one_line import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from effexport.bench.advice import Plan
    from effexport.bench.costs import OnStep
    from effexport.bench.recommendation import Advice
    from effexport.bench.results import BenchResults
    from effexport.bench.run import Settings

DEFAULT_OUTPUT = Path("bench")
INTERRUPTED = 130


@verb("bench", BenchRequest)
def command(request: BenchRequest, as_json: bool) -> None:
    """Time attention variants in several runtimes on this machine.

    Every candidate is first compared with PyTorch; candidates that disagree are not timed. Runs take turns. Each row
    also shows a lower bound, the floor: the matrix products of its formula plus one pass over its inputs and outputs,
    timed in the same run. Runs that other programs disturbed are repeated; a row that stays disturbed is shown, but no
    ratio, rank or crossover is derived from it. Ctrl-C keeps the results so far.

    With --advise, only what an advice needs is measured: the cheapest variants first, and none that would clearly miss
    a limit. It exits with 1 if nothing could be measured, and writes a folder only with -o.
    """
    from effexport.bench.page import BENCH_FOLDER, write_results
    from effexport.bench.recommendation import advice_from_results

    what, settings = request.resolve()
    target = request.output or (None if request.advise else DEFAULT_OUTPUT)
    if target is not None:
        click.get_current_context().with_resource(BENCH_FOLDER.reserved(target, force=request.force))
    require_torch("effexport bench")
    results = measured_grid(what, settings) if isinstance(what, Grid) else measured_plan(what, settings)
    if not results.complete and all(row.status == "not run" for row in results.rows):
        raise InterruptError("Interrupted before anything was measured; nothing was written.")
    advice = None if isinstance(what, Grid) else advice_from_results(results, what)
    console = result_console(as_json=as_json)
    if not as_json:
        show_results(console, results, advice, as_json=as_json)  # first: a full disk must not cost the measurements
    written = write_results(results, target, advice, force=request.force) if target is not None else ()
    if as_json:
        show_results(console, results, advice, as_json=as_json)  # last: one object on stdout, this or the error
    if written:
        say(console, f"written: {', '.join(map(str, written))}")
    code = exit_code(results)
    if code == INTERRUPTED:
        say(stderr_console(), "Interrupted; the results so far are above.", "yellow")
    if code:
        raise click.exceptions.Exit(code)


def measured_grid(grid: Grid, settings: Settings) -> BenchResults:
    """Announce a benchmark and carry it out."""
    from effexport.bench.run import bench, total_cost
    from effexport.units import counted, rough_duration

    console = stderr_console()
    rows = counted(len(list(grid.cases())), "row")
    name = f"preset {settings.preset}" if settings.preset else "plan"
    say(console, f"{name}: {rows}; about {rough_duration(total_cost(grid, settings))}; Ctrl-C keeps the results so far")
    with bench_progress(console) as on_step:
        return bench(grid, settings, on_step)


def measured_plan(plan: Plan, settings: Settings) -> BenchResults:
    """Announce the plan of an advice and carry it out."""
    from effexport.bench.adviser import advise
    from effexport.bench.recommendation import model_text
    from effexport.units import listed, rough_duration

    console = stderr_console()
    seconds = rough_duration(plan.seconds(settings.rounds, settings.max_seconds))
    say(console, f"plan: {model_text(plan)}; about {seconds}, and Ctrl-C gives the advice so far")
    order = "; ".join(cases[0].label for cases in plan.models)
    say(console, f"      on {listed(plan.grid.runtimes)}, the cheapest first: {order}")
    if plan.probed_length is not None:
        probed = f"{plan.probed_length:,} tokens"
        say(console, f"      each is first timed with {probed}, and left out if it would clearly miss a limit")
    with bench_progress(console) as on_step:
        return advise(plan, settings, on_step)


def show_results(console: Console, results: BenchResults, advice: Advice | None, *, as_json: bool) -> None:
    """Print the benchmark or the advice; with --json also the contents of results.json, with the advice beside them."""
    from effexport.bench.page import document_from_results, json_of_advice
    from effexport.cli import print_json
    from effexport.render.terminal import print_document

    if as_json:
        print_json(json.loads(results.to_json()) | ({"advice": json_of_advice(advice)} if advice else {}))
    print_document(console, document_from_results(results, advice))


def exit_code(results: BenchResults) -> int:
    """1 if a parity check failed or one of our own models did not run, or if nothing was timed.

    A model that other tools cannot export or compile is a result; one that this machine cannot run is not a failure.
    """
    from effexport.runtimes import RUNTIMES

    if not results.complete:
        return INTERRUPTED
    if all(row.timing is None for row in results.rows):
        return 1
    failed = [row for row in results.rows if row.status == "failed"]
    return 1 if any(row.parity is not None or RUNTIMES[row.case.runtime].graph == "ours" for row in failed) else 0


@contextmanager
def bench_progress(console: Console) -> Iterator[OnStep]:
    """Yield a function that shows each step: a bar with the time left on a terminal, else a line per candidate."""
    if not console.is_terminal:
        last = ""

        def print_step(step: Any) -> None:
            nonlocal last
            text = step.text.partition(": round")[0]
            if text != last:
                say(console, f"… {text}")
            last = text

        yield print_step
        return
    share, left = text_column("{task.percentage:>3.0f} %"), text_column("{task.fields[left]}")
    with bars_of(console, bar_column(), share, clock_column(), left, text_column("{task.description}")) as bars:
        task = bars.add_task("starting", total=1.0, left="")

        def show(step: Any) -> None:
            bars.update(task, completed=step.share, description=step.text, left=time_left(step.seconds_left))

        yield show
