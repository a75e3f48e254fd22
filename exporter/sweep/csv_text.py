"""Results as CSV: one header, one line per cell, flat columns with units in their names."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields

from effexport.sweep.results import Row, SweepResults

COLUMNS = tuple(field.name for field in fields(Row) if field.name != "log_tail")


def csv_from_results(results: SweepResults) -> str:
    """An empty cell is a value that there is not."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in results.rows:
        writer.writerow(asdict(row))
    return text.getvalue()
