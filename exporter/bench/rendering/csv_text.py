"""Results as CSV: one header, one line per row, flat columns with units in their names."""

from __future__ import annotations

import csv
import io
from typing import Any

from effexport.bench.results import BenchResults, Row

COLUMNS = (
    "label",
    "variant",
    "options",
    "scope",
    "seq_len",
    "batch",
    "precision",
    "heads",
    "head_dim",
    "runtime",
    "implementation",
    "status",
    "reason",
    "parity_passed",
    "parity_metric",
    "parity_value",
    "parity_limit",
    "runs",
    "median_ms",
    "mean_ms",
    "deviation_ms",
    "lowest_ms",
    "highest_ms",
    "spread_ms",
    "tokens_per_second",
    "times_softmax",
    "times_torch",
    "floor_products_ms",
    "floor_pass_ms",
    "floor_ms",
    "times_floor",
    "peak_bytes",
    "note",
)


def csv_from_results(results: BenchResults) -> str:
    """An empty cell is a value that was not measured."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in results.rows:
        writer.writerow(cells(row))
    return text.getvalue()


def cells(row: Row) -> dict[str, Any]:
    case, timing, floor, parity = row.case, row.timing, row.floor, row.parity
    values: dict[str, Any] = {
        name: getattr(case, name)
        for name in ("label", "variant", "scope", "seq_len", "batch", "precision", "heads", "head_dim", "runtime")
    }
    values |= {
        name: getattr(row, name)
        for name in ("status", "reason", "tokens_per_second", "times_softmax", "times_torch", "times_floor")
    }
    values |= {"peak_bytes": row.peak_bytes, "note": row.note}
    values["options"] = joined(case.options)
    values["implementation"] = joined(row.implementation)
    if parity is not None:
        values |= {f"parity_{name}": getattr(parity, name) for name in ("passed", "metric", "value", "limit")}
    if timing is not None:
        names = ("runs", "median_ms", "mean_ms", "deviation_ms", "lowest_ms", "highest_ms", "spread_ms")
        values |= {name: getattr(timing, name) for name in names}
    if floor is not None:
        values |= {"floor_products_ms": floor.products_ms, "floor_pass_ms": floor.pass_ms, "floor_ms": floor.total_ms}
    return values


def joined(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
