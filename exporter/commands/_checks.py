"""The table of parity checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effexport.commands._options import say
from effexport.proof.checks.result import Check, Kind, summary
from effexport.report.rendering.text import status_of
from effexport.units import number

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print one row per kind of check; below it, every check that failed or did not run, and whether the reference
    disagreed with itself."""
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "result", "metric", box=None, pad_edge=False)
    for title in ("worst", "limit", "cases"):
        table.add_column(title, justify="right")
    for name, entry in summary(checks).items():
        status = status_of(entry)
        cases = entry["passed"] + entry["failed"] + entry["not run"]
        table.add_row(
            name,
            Text(status, style=_STYLES[status]),
            entry["metric"],
            number(entry["worst"]),
            number(entry["limit"]),
            f"{entry['passed']} of {cases}",
        )
    console.print(table)
    for check in checks:
        if check.status != "passed" or (check.kind == Kind.REFERENCE_REPEATABLE and check.detail):
            failed = check.status == "failed"  # perhaps without a value: a body that does not run
            value = f" {number(check.value)} > {number(check.limit)}" if check.value is not None and failed else ""
            explanation = "; ".join(part for part in (check.detail, check.reason) if part)
            line = f"{check.status}: {check.name} ({check.case}), {check.metric}{value}; {explanation}"
            say(console, line, style=_STYLES[check.status])
