"""Results as CSV: one header, one line per row, flat columns with units in their names."""

from __future__ import annotations

from typing import Any

from effexport.bench.results import BenchResults, Row
from effexport.files import csv_text

_CASE = ["label", "variant", "options", "scope", "seq_len", "batch", "precision", "heads", "head_dim", "runtime"]
_TIMING = ["runs", "median_ms", "mean_ms", "deviation_ms", "lowest_ms", "highest_ms", "spread_ms"]
# column → attribute of a row, in the order of the file
COLUMNS: dict[str, str] = {
    **{name: f"case.{name}" for name in _CASE},
    **{name: name for name in ("implementation", "status", "reason")},
    **{f"parity_{name}": f"parity.{name}" for name in ("passed", "metric", "value", "limit")},
    **{name: f"timing.{name}" for name in _TIMING},
    **{name: name for name in ("tokens_per_second", "times_softmax", "times_torch")},
    **{f"floor_{name}": f"floor.{name}" for name in ("products_ms", "pass_ms")},
    "floor_ms": "floor.total_ms",
    **{name: name for name in ("times_floor", "peak_bytes", "note")},
}


def csv_from_results(results: BenchResults) -> str:
    """The rows as CSV; the cell of a value that was not measured is empty."""
    return csv_text(COLUMNS, ([cell(row, path) for path in COLUMNS.values()] for row in results.rows))


def cell(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return " ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else value
