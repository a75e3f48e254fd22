"""The folder of a benchmark: results.json, results.csv and report.html, all of them or none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.bench.rendering.page import html_from_results
from effexport.bench.results import BenchResults, Row
from effexport.files import FolderKind, csv_text

if TYPE_CHECKING:
    from effexport.bench.rendering.advise import Advice

JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
BENCH_FOLDER = FolderKind("a benchmark", JSON, b'{\n  "format_version": 1,\n  "rows": [')
_CASE = ["label", "variant", "options", "scope", "seq_len", "batch", "precision", "heads", "head_dim", "runtime"]
_TIMING = ["runs", "median_ms", "mean_ms", "deviation_ms", "lowest_ms", "highest_ms", "spread_ms"]
# Column of the CSV file (flat, with units in the names) → attribute of a row, in the order of the file.
COLUMNS: dict[str, str] = {
    **{name: f"case.{name}" for name in _CASE},
    **{name: name for name in ("implementation", "status", "reason")},
    **{f"parity_{name}": f"parity.{name}" for name in ("passed", "metric", "value", "limit")},
    **{name: f"timing.{name}" for name in _TIMING},
    **{name: name for name in ("tokens_per_second", "times_softmax", "times_torch")},
    **{f"floor_{name}": f"floor.{name}" for name in ("products_ms", "pass_ms")},
    "floor_ms": "floor.total_ms",
    **{name: name for name in ("times_floor", "peak_bytes", "note")},
    **{f"rounds_{name}": f"disturbance.{name}" for name in ("kept", "dropped")},
    **{name: f"disturbance.{name}" for name in ("waited_share", "own_cores", "other_cores", "stolen_cores")},
}


def write_results(
    results: BenchResults, output: Path, advice: Advice | None = None, *, force: bool
) -> tuple[Path, ...]:
    """Write all files or none; the page begins with the advice. Returns their paths. Raises as `FolderKind.new`."""
    texts = {JSON: results.to_json(), CSV: csv_from_results(results), PAGE: html_from_results(results, advice)}
    with BENCH_FOLDER.new(output, force=force) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return tuple(output / name for name in texts)


def csv_from_results(results: BenchResults) -> str:
    """The rows as CSV; the cell of a value that was not measured is empty."""
    return csv_text(COLUMNS, ([cell(row, path) for path in COLUMNS.values()] for row in results.rows))


def cell(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return " ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else value
