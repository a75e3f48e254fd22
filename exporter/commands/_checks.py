"""The table of parity checks, and what failed or did not run in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effexport.commands._options import cell
from effexport.one_line import say
from effexport.proof.check import NOT_MEASURED, Check, Kind, by_name, only_weights_failed, outcome_of, summary
from effexport.report.problems import problems_of
from effexport.report.rendering.text import cases_text
from effexport.units import NOTHING, number

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow", "not applicable": "dim"}


def print_checks(console: Console, checks: Sequence[Check], divergence: str = "") -> None:
    """Print one row per kind of check. Failures come first, because a reader begins at the top, and before them the
    first divergence inside the graph, unless it is known to follow from other weights; below the table comes what did
    not run, and whether the reference disagreed with itself."""
    problems = problems_of(checks)
    weights_first = only_weights_failed(checks)
    if divergence and not weights_first:
        say(console, divergence, style="bold")
    for problem in problems:
        if problem.outcome == "failed":
            say(console, problem.text, style=_STYLES["failed"])
    if divergence and weights_first:
        say(console, divergence, style="bold")
    print_table(console, checks)
    for problem in problems:
        if problem.outcome != "failed":
            say(console, problem.text, style=_STYLES[problem.outcome])
    for check in checks:
        if check.kind == Kind.REFERENCE_REPEATABLE and check.detail:
            say(console, f"note: {check.detail}", style="yellow")


def print_table(console: Console, checks: Sequence[Check]) -> None:
    from rich.table import Table

    table = Table("check", "result", "metric", box=None, pad_edge=False)
    for title in ("worst", "limit", "cases"):
        table.add_column(title, justify="right")
    groups = by_name(checks)
    for name, entry in summary(checks).items():
        group = groups[name]
        outcome = outcome_of(group)
        measured = outcome in ("passed", "failed") and entry["metric"] != NOT_MEASURED
        table.add_row(
            cell(name),
            cell(outcome, _STYLES[outcome]),
            cell(entry["metric"] if measured else NOTHING),
            number(entry["worst"]),
            number(entry["limit"]),
            cases_text(group),
        )
    console.print(table)
