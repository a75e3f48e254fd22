"""`effexport sweep`."""

from __future__ import annotations

import shlex
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import debug_option, json_option, stderr_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from effexport.sweep.attempt import Limits
    from effexport.sweep.cell import Cell
    from effexport.sweep.executor import Executor
    from effexport.sweep.results import SweepResults
    from effexport.sweep.run import Plan
    from effexport.sweep.store import Store

INTERRUPTED = 130
# What Ray has to say; stdout belongs to --json.
MESSAGES = "ray.log"


@click.command("sweep")
@click.argument("sweep_file", metavar="SWEEP.toml", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the results; default sweeps/NAME.")
@click.option("--address", help="Ray cluster to run on: host:port of its head, or auto on one of its nodes.")
@click.option("--dry-run", is_flag=True, help="Say which cells there are, what is finished and what would run.")
@click.option("--retry-failed", is_flag=True, help="Run cells again that failed before; finished ones never.")
@click.option("--only", multiple=True, metavar="CELL", help="Run this cell alone, by its name or hash. Repeatable.")
@click.option("--jobs", type=int, help="On this machine: cells at a time; default: as cores and memory allow.")
@click.option("--processes", is_flag=True, help="On this machine: plain processes, without Ray.")
@click.option("--cpus", type=float, default=1.0, show_default=True, help="On a cluster: CPUs that a cell takes.")
@click.option("--wait", type=float, default=60.0, show_default=True, help="Seconds to wait for a node that can run it.")
@click.option("--timeout", type=float, help="Seconds that a cell may take; default 14400.")
@click.option("--max-artifact", metavar="SIZE", help="Largest artifact of a cell, such as 4G; default 16 GB.")
@json_option
@debug_option
@click.pass_context
def command(context: click.Context, /, as_json: bool, debug: bool, **flags: Any) -> None:
    """Build every cell of SWEEP.toml: variants × lengths × precisions × targets × GPUs. docs/sweep.md has the format.

    Cells run side by side, by Ray where it is installed. What is finished is never built again, whatever interrupted
    the sweep before; a cell that fails leaves the others alone.
    """
    request = Request(**flags, command=shlex.join(repeated(context)))
    plan, store = request.resolve()
    if request.dry_run:
        show_plan(plan, store, as_json=as_json)
        return
    console = stderr_console()
    results, complete = run(request, plan, store, console)
    show_results(console, store, results, as_json=as_json)
    if not complete:
        console.print("interrupted: the same command goes on where this one stopped", style="yellow")
        raise click.exceptions.Exit(INTERRUPTED)
    asked = {cell.id for cell in request.chosen(plan.cells)}
    if any(row.status != "finished" for row in results.rows if row.id in asked):
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class Request:
    """What the options ask for."""

    sweep_file: Path
    output: Path | None
    address: str | None
    dry_run: bool
    retry_failed: bool
    only: tuple[str, ...]
    jobs: int | None
    processes: bool
    cpus: float
    wait: float
    timeout: float | None
    max_artifact: str | None
    command: str

    @property
    def folder(self) -> Path:
        return self.output or Path("sweeps") / self.sweep_file.stem

    def resolve(self) -> tuple[Plan, Store]:
        """Raises UserError and SpecError for a file or options that cannot work; nothing is written."""
        from effexport.errors import UserError
        from effexport.models.validation import SpecError
        from effexport.sweep.cells import cells_from_file
        from effexport.sweep.run import plan_of
        from effexport.sweep.store import Store
        from effexport.sweep.sweep_file import sweep_file_from_path

        self.check_options()
        file = sweep_file_from_path(self.sweep_file)
        try:
            cells = cells_from_file(file)
        except (SpecError, UserError) as error:
            raise UserError(f"{self.sweep_file}: {error}") from error
        store = Store(self.folder)
        store.check()
        only = self.chosen(cells) if self.only else None
        return plan_of(store, cells, retry_failed=self.retry_failed or only is not None, only=only), store

    def check_options(self) -> None:
        from effexport.models.validation import require

        for name in ("jobs", "timeout", "cpus"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name} is {value}; expected a number above 0")
        require(self.wait >= 0, f"--wait is {self.wait:g}; expected seconds, 0 or more")
        if self.address is not None:
            require(bool(self.address.strip()), "--address is empty; expected host:port of a Ray cluster, or auto")
            require(not self.processes, "--processes runs on this machine, --address on a cluster; give one")
            require(self.jobs is None, "--jobs is for this machine; a cluster runs what its CPUs and GPUs allow")
        self.limits()

    def limits(self) -> Limits:
        from dataclasses import replace

        from effexport.commands._engine_options import bytes_from_text
        from effexport.sweep.attempt import Limits

        limits = Limits()
        if self.timeout is not None:
            limits = replace(limits, seconds=self.timeout)
        size = bytes_from_text(self.max_artifact)
        return limits if size is None else replace(limits, artifact_bytes=size)

    def chosen(self, cells: Any) -> list[Cell]:
        """The cells that --only names; all without it. Raises UserError for a name that is not one cell's."""
        from effexport.errors import UserError
        from effexport.models.validation import did_you_mean

        if not self.only:
            return list(cells)
        found: dict[str, Cell] = {}
        for name in self.only:
            named = [cell for cell in cells if name and (cell.id == name or cell.digest.startswith(name))]
            if len(named) != 1:
                ids = [cell.id for cell in cells]
                problem = "is no cell of the file" if not named else f"begins the hash of {len(named)} cells"
                raise UserError(
                    f"--only {name} {problem}{did_you_mean(name, ids)} Expected a name or hash as --dry-run lists "
                    "them; a cell whose options changed has another one"
                )
            found[named[0].id] = named[0]
        return list(found.values())

    def executor(self, console: Console) -> Executor:
        """Raises MissingExtraError and UserError."""
        import importlib.util

        from effexport.sweep.machine import jobs_of_machine
        from effexport.sweep.processes import ProcessExecutor

        limits, jobs = self.limits(), self.jobs or jobs_of_machine()
        if self.address is not None:
            from effexport.sweep.cluster import cluster_executor

            return cluster_executor(self.address, limits, cpus=self.cpus, wait_seconds=self.wait)
        if not self.processes and importlib.util.find_spec("ray") is not None:
            from effexport.sweep.cluster import local_executor

            return local_executor(limits, jobs=jobs)
        if not self.processes:
            console.print(
                "note: Ray is not installed, so cells run as plain processes of this machine, with the same results; "
                "for a cluster: pip install 'effexport[sweep]'",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
        return ProcessExecutor(limits, jobs)


def run(request: Request, plan: Plan, store: Store, console: Console) -> tuple[SweepResults, bool]:
    """Run what is to run, and write the files of the results whatever happens."""
    import time

    from effexport.commands._sweep_text import sweep_progress
    from effexport.sweep.output import results_of_sweep, write_results
    from effexport.sweep.run import Sweep

    started, complete, where = time.monotonic(), True, ""
    sweep = None
    with store.opened(), ExitStack() as stack:
        say_plan(console, plan, store, request)
        if plan.to_run:
            # connected before anything else is said, so that a bad address is the one message
            messages = stack.enter_context((store.path / MESSAGES).open("a", encoding="utf-8"))
            stack.enter_context(redirect_stdout(messages))
            with closing(request.executor(console)) as executor, sweep_progress(console) as on_news:
                where = executor.title
                console.print(f"running on {where}", markup=False, soft_wrap=True)
                sweep = Sweep(store, executor, on_news)
                try:
                    sweep.run(plan.to_run)
                except KeyboardInterrupt:
                    complete = False
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


def say_plan(console: Console, plan: Plan, store: Store, request: Request) -> None:
    from effexport.bench.text import counted

    states = [plan.states[cell.id] for cell in plan.cells]
    parts = [f"{states.count('finished')} finished before", f"{len(plan.to_run)} to run"]
    failed = sum(plan.states[cell.id] == "failed" for cell in plan.cells if cell not in plan.to_run)
    if failed:
        parts.append(f"{failed} failed before and left alone: add --retry-failed")
    console.print(
        f"{request.sweep_file}: {counted(len(states), 'cell')}, {', '.join(parts)}", markup=False, soft_wrap=True
    )
    for cell in plan.to_run:
        damage = store.damage(cell)
        if damage:
            console.print(f"note: {cell.id} is built again: {damage}", style="yellow", markup=False, soft_wrap=True)


def command_of_cell(request: Request) -> Callable[[str], str]:
    """The command that repeats one cell alone."""
    words = ["effexport", "sweep", str(request.sweep_file), "-o", str(request.folder)]
    if request.address is not None:
        words += ["--address", request.address]
    return lambda name: shlex.join([*words, "--only", name])


def show_plan(plan: Plan, store: Store, *, as_json: bool) -> None:
    from effexport.cli import print_json
    from effexport.commands._sweep_text import print_plan

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
    print_plan(stderr_console(), plan)


def show_results(console: Console, store: Store, results: SweepResults, *, as_json: bool) -> None:
    import json

    from effexport.cli import print_json
    from effexport.commands._sweep_text import print_rows

    if as_json:
        print_json({"output": str(store.path)} | json.loads(results.to_json()))
    print_rows(console, results, store.path)


def repeated(context: click.Context) -> list[str]:
    """The command that was given."""
    words = ["effexport", "sweep", str(context.params["sweep_file"])]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not isinstance(parameter, click.Option) or not given:
            continue
        values = context.params[name] if parameter.multiple else [context.params[name]]
        for value in values:
            words += [parameter.opts[-1]] + ([] if parameter.is_flag else [str(value)])
    return words
