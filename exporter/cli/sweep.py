"""`effexport sweep`."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.base.disk import write_error
from effexport.base.environment import require_torch
from effexport.base.errors import InterruptError, UserError
from effexport.base.formatting import Word, bytes_from_text, command_line, counted, say
from effexport.base.option_fields import A_FOLDER, A_NUMBER, Options, argument, command_of, option
from effexport.bench.cells import Cell, Store, failed
from effexport.bench.executors import CellLimits, Executor, cluster_executor, local_executor, process_executor
from effexport.bench.grid import Step, SweepResults
from effexport.bench.page import CSV, JSON, PAGE, document_from_sweep, write_sweep
from effexport.bench.sweep import Sweep, SweepPlan, plan_of, results_of_sweep
from effexport.bench.sweep_file import cells_from_path
from effexport.cli._console import result_console, stderr_console, step_progress, time_left
from effexport.cli._verbs import verb
from effexport.cli.main import print_json
from effexport.models.validation import did_you_mean, require
from effexport.render.document import Column, Line, Table

if TYPE_CHECKING:
    from rich.console import Console

MESSAGES = "ray.log"
NOWHERE = Executor("", 1, lambda cell, folder, started, is_cancelled: failed("nothing had to run"))


@dataclass(frozen=True)
class SweepRequest(Options):
    """The options of `effexport sweep`."""

    sweep_file: Path = field(metadata=argument("The combinations.", metavar="SWEEP.toml"))
    _: KW_ONLY
    output: Path | None = option(None, "Folder of the results; default: sweeps/NAME.", short="-o", metavar=A_FOLDER)
    dry_run: bool = option(False, "List the cells, finished and to run.")
    retry_failed: bool = option(False, "Also run cells that failed before.")
    only: Sequence[str] = option((), "Run only this one, by name or hash. Repeatable.", metavar="CELL")
    jobs: int | None = option(None, "Cells at a time on this machine; default: what fits.", metavar=A_NUMBER)
    processes: bool = option(False, "On this machine: plain processes, not Ray.")
    address: str | None = option(None, "Ray cluster to run on: host:port, or auto.", metavar="ADDRESS")
    cpus: float = option(1.0, "On a cluster: CPUs per cell.", metavar=A_NUMBER)
    wait: float = option(60.0, "On a cluster: longest wait for a node.", metavar="SECONDS")
    timeout: float | None = option(None, "A cell is stopped after it; default: 14400.", metavar="SECONDS")
    max_artifact: str | None = option(None, "Largest artifact, such as 4GiB; default: 16GB.", metavar="SIZE")

    @property
    def folder(self) -> Path:
        return self.output or Path("sweeps") / self.sweep_file.stem

    def resolve(self) -> tuple[SweepPlan, Store]:
        """Raises UserError and SpecError for a file or options that cannot work; nothing is written."""
        self.check_options()
        cells = cells_from_path(self.sweep_file)
        store = Store(self.folder)
        store.check()
        return plan_of(store, cells, self.chosen(cells), retry_failed=self.retry_failed or bool(self.only)), store

    def check_options(self) -> None:
        for name in ("jobs", "timeout", "cpus"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name} is {value}; expected a number above 0")
        require(self.wait >= 0, f"--wait is {self.wait:g}; expected seconds, 0 or more")
        if self.address is not None:
            require(bool(self.address.strip()), "--address is empty; expected host:port of a Ray cluster, or auto")
            require(not self.processes, "--processes runs on this machine, --address on a cluster; give one of them")
            require(
                self.jobs is None,
                "--jobs does not work with --address; a cluster runs as many cells as its CPUs and GPUs allow",
            )
        self.limits()

    def limits(self) -> CellLimits:
        limits = CellLimits() if self.timeout is None else CellLimits(seconds=self.timeout)
        if self.max_artifact is None:
            return limits
        return replace(limits, artifact_bytes=bytes_from_text(self.max_artifact, "--max-artifact"))

    def chosen(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that --only names, or all cells. Raises UserError for a name that does not match one cell."""
        if not self.only:
            return list(cells)
        found: dict[str, Cell] = {}
        for name in self.only:
            named = [cell for cell in cells if name and (cell.id == name or cell.digest.startswith(name))]
            if len(named) != 1:
                ids = [cell.id for cell in cells]
                problem = "is not a cell of the file" if not named else f"matches the hashes of {len(named)} cells"
                raise UserError(
                    f"--only {name} {problem}{did_you_mean(name, ids)} Expected a name or hash from --dry-run; a "
                    "cell whose options changed has a new hash"
                )
            found[named[0].id] = named[0]
        return list(found.values())

    def executor(self, console: Console) -> Executor:
        """Raises MissingExtraError and UserError."""
        limits = self.limits()
        if self.address is not None:
            return cluster_executor(self.address, limits, cpus=self.cpus, wait_seconds=self.wait)
        require_torch("a sweep on this machine")
        if not self.processes and importlib.util.find_spec("ray") is not None:
            return local_executor(limits, jobs=self.jobs)
        if not self.processes:
            say(
                console,
                "note: Ray is not installed, so cells run as plain processes on this machine, with the same results; "
                "to use a cluster: pip install 'effexport[sweep]'",
                style="yellow",
            )
        return process_executor(limits, self.jobs)


@verb("sweep", SweepRequest)
def sweep_command(request: SweepRequest, as_json: bool) -> None:
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
    results = run(request, plan, store, console)
    show_results(store, results, as_json=as_json)
    if not results.complete:
        say(console, "Interrupted; run the same command again to resume.", "yellow")
        raise click.exceptions.Exit(InterruptError.exit_code)
    asked = {cell.id for cell in request.chosen(plan.cells)}
    if any(row.status != "finished" for row in results.rows if row.id in asked):
        raise click.exceptions.Exit(1)


def run(request: SweepRequest, plan: SweepPlan, store: Store, console: Console) -> SweepResults:
    """Run the cells of the plan and write the result files, also after an interrupt."""
    started, complete = time.monotonic(), True
    # before anything is written, so that a bad address is the only message
    executor = request.executor(console) if plan.to_run else NOWHERE
    with closing(executor), store.opened():
        say_plan(console, plan, store, request)
        if plan.to_run:
            say(console, f"running on {executor.title}")
        with messages_of_ray(store), step_progress(console, line_of_step, of_cells=True) as on_step:
            sweep = Sweep(store, executor, on_step)
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
            command=command_of("sweep", request),
            command_of_cell=command_of_cell(request),
            where=executor.title,
            seconds=round(time.monotonic() - started, 3),
            complete=complete,
        )
        write_sweep(results, store.path)
    return results


@contextmanager
def messages_of_ray(store: Store) -> Iterator[None]:
    """Redirect what Ray prints about nodes to a file, because stdout is for --json."""
    path = store.path / MESSAGES
    with path.open("a", encoding="utf-8") as stream, redirect_stdout(stream):
        try:
            yield
        finally:
            if not stream.tell():
                path.unlink(missing_ok=True)


def say_plan(console: Console, plan: SweepPlan, store: Store, request: SweepRequest) -> None:
    finished = sum(state == "finished" for state in plan.states.values())
    parts = [f"{finished} finished before", f"{len(plan.to_run)} to run"]
    failed = sum(plan.states[cell.id] == "failed" for cell in plan.cells if cell not in plan.to_run)
    if failed:
        parts.append(f"{failed} failed before (skipped; --retry-failed runs them again)")
    say(console, f"{request.sweep_file}: {counted(len(plan.cells), 'cell')}, {', '.join(parts)}")
    for cell in plan.to_run:
        if damage := store.damage(cell):
            say(console, f"note: {cell.id} is rebuilt: {damage}", style="yellow")


def command_of_cell(request: SweepRequest) -> Callable[[str], str]:
    """A function from the id of a cell to the command that runs only this cell."""
    words: list[Word] = ["effexport", "sweep", request.sweep_file, "-o", request.folder]
    if request.address is not None:
        words.append(("--address", request.address))
    return lambda name: command_line(*words, ("--only", name))


def show_plan(plan: SweepPlan, store: Store, *, as_json: bool) -> None:
    """Print every cell with its hash, and whether it would run."""
    from effexport.render.formats import print_part

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
    states = plan.states | {name: "would run again" for name in to_run if plan.states[name] == "failed"}
    lines = [Line((cell.id, cell.title, states[cell.id])) for cell in plan.cells]
    console = result_console(as_json=as_json)
    print_part(console, Table("Cells", columns, tuple(lines)))
    finished = sum(state == "finished" for state in plan.states.values())
    say(console, f"{len(plan.cells)} cells, {finished} finished, {len(to_run)} would run")


def show_results(store: Store, results: SweepResults, *, as_json: bool) -> None:
    from effexport.render.formats import print_document

    if as_json:
        print_json({"output": str(store.path)} | json.loads(results.to_json()))
    console = result_console(as_json=as_json)
    print_document(console, document_from_sweep(results))
    say(console, f"Written: {', '.join(str(store.path / name) for name in (JSON, CSV, PAGE))}")


def line_of_step(step: Step) -> str:
    left = time_left(step.seconds_left)
    return f"[{step.done}/{step.total}{left and f', {left}'}] {step.text}"
