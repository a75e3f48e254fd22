"""The results of a sweep as a page: one self-contained file, no scripts, no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from effexport.render.multiples import Chart, Line, Quantity, chart_of
from effexport.render.templates import template_environment
from effexport.sweep.results import Row, SweepResults
from effexport.units import duration, memory, moment, number

# A longer table is folded, so that the sections below it are easy to find.
MAX_OPEN_ROWS = 60


def html_from_results(results: SweepResults) -> str:
    """The page of a sweep."""
    filters: dict[str, Callable[..., Any]] = {
        "moment": moment,
        "css": css_of,
        "number": number,
        "seconds": lambda value: duration(None if value is None else value * 1000),
        "memory": memory,
        "path": quote,
    }
    environment = template_environment(("render", "sweep"), filters)
    return environment.get_template("page.html.j2").render(
        results=results,
        groups=groups_of(results.rows),
        chart=sweep_chart(results.rows),
        problems=[row for row in results.rows if row.status != "finished"],
        is_open=len(results.rows) <= MAX_OPEN_ROWS,
        shared=shared_fields(results.rows),
    )


def sweep_chart(rows: Sequence[Row]) -> Chart | None:
    """Errors with their limits, sizes and times against length; None if nothing was built for several lengths."""
    finished = [row for row in rows if row.status == "finished"]
    parts = [(row.precision, row.target, row.gpu) for row in finished]
    varying = [n for n in range(3) if len({part[n] for part in parts}) > 1]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row, part in zip(finished, parts, strict=True):
        place = ", ".join(part[n] for n in varying if part[n])
        groups.setdefault((row.label, place), []).append(row)
    if all(len({row.seq_len for row in group}) < 2 for group in groups.values()):
        return None

    def lines(field: str, unit: float = 1.0, limit: str = "") -> list[Line]:
        """The values of a field in some unit; a logarithmic axis has no 0."""

        def values(rows: Sequence[Row], name: str) -> dict[int, float]:
            return {row.seq_len: getattr(row, name) / unit for row in rows if name and getattr(row, name)}

        return [Line(*key, values(rows, field), values(rows, limit)) for key, rows in groups.items()]

    return chart_of(
        "sweep",
        {
            Quantity("Worst error against length", "max |error| / RMS", number): lines(
                "worst_error", limit="error_limit"
            ),
            Quantity("Size of the model against length", "megabytes", "{:.3g} MB".format): lines("model_bytes", 1e6),
            Quantity("Time of the build against length", "seconds", "{:.3g} s".format): lines("seconds"),
        },
    )


def css_of(status: str) -> str:
    """The CSS class of a state or a verdict."""
    return {"finished": "passed"}.get(status, status).replace(" ", "-")


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each variant with its options, by label."""
    return {label: [row for row in rows if row.label == label] for label in dict.fromkeys(row.label for row in rows)}


def shared_fields(rows: Sequence[Row]) -> dict[str, Any]:
    """Fields that are the same in all rows."""
    named: dict[str, list[Any]] = {"scope": [row.scope for row in rows], "batch": [row.batch for row in rows]}
    return {name: values[0] for name, values in named.items() if len(set(values)) == 1}
