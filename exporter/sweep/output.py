"""The results of a sweep: read from the records in its folder, written as results.json, results.csv and report.html."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from effexport.disk import write_error
from effexport.environment import versions
from effexport.files import csv_text, write_file
from effexport.sweep.cell import Cell
from effexport.sweep.outcome import ARTIFACT, LOG
from effexport.sweep.page import html_from_results
from effexport.sweep.results import Row, SweepResults, fields_of_record, row_of_cell
from effexport.sweep.run import Plan, Sweep
from effexport.sweep.store import CELLS, FAILED, Store

JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
# Columns of the CSV file: every field of a row but the log, which has many lines.
COLUMNS = tuple(field.name for field in fields(Row) if field.name != "log_tail")


def results_of_sweep(
    plan: Plan, store: Store, sweep: Sweep | None, *, command_of_cell: Callable[[str], str], **known: Any
) -> SweepResults:
    """The results, with one row for every cell of the file, also for cells that an earlier run finished.

    sweep: the run that has just ended; None if nothing had to run.
    """
    environment = {name: version for name, version in versions().items() if version is not None}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    rows = tuple(row_of(cell, plan, store, sweep, command_of_cell(cell.id)) for cell in plan.cells)
    return SweepResults(rows=rows, created=created, environment=environment, **known)


def row_of(cell: Cell, plan: Plan, store: Store, sweep: Sweep | None, command: str) -> Row:
    record = store.finished(cell)
    if record is not None:
        folder = f"{CELLS}/{cell.id}"
        is_new = sweep is not None and cell.id in sweep.new
        paths = {"artifact": f"{folder}/{ARTIFACT}", "log": f"{folder}/{LOG}"}
        return row_of_cell(cell, "finished", command, is_new=is_new, **paths, **fields_of_record(record))
    if sweep is not None and cell.id in sweep.not_run:
        return row_of_cell(cell, "not run", command, reason=sweep.not_run[cell.id])
    record = store.failed(cell)
    if record is not None:
        is_new = sweep is not None and cell.id in sweep.attempts
        log = f"{FAILED}/{cell.id}/{LOG}"
        return row_of_cell(cell, "failed", command, is_new=is_new, log=log, **fields_of_record(record))
    is_asked = any(cell.id == other.id for other in plan.to_run)
    reason = "the sweep was interrupted before it finished" if is_asked else "left out by --only"
    return row_of_cell(cell, "not run", command, reason=reason)


def write_results(results: SweepResults, folder: Path) -> None:
    """Write each file completely or not at all. Raises UserError."""
    texts = {
        JSON: results.to_json(),
        CSV: csv_text(COLUMNS, map(attrgetter(*COLUMNS), results.rows)),
        PAGE: html_from_results(results),
    }
    try:
        for name, text in texts.items():
            write_file(folder / name, text)
    except OSError as error:
        raise write_error(folder, error, "move the folder; it has the finished cells") from error
