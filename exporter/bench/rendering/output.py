"""The folder of a benchmark: results.json, results.csv and report.html, all of them or none."""

from __future__ import annotations

from pathlib import Path

from effexport.bench.rendering.csv_text import csv_from_results
from effexport.bench.rendering.page import html_from_results
from effexport.bench.results import BenchResults
from effexport.errors import UserError
from effexport.files import FolderKind

JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
BENCH_FOLDER = FolderKind("a benchmark", JSON)


def write_results(results: BenchResults, output: Path, *, force: bool) -> tuple[Path, ...]:
    """Write all files or none. Returns their paths. Raises UserError."""
    texts = {JSON: results.to_json(), CSV: csv_from_results(results), PAGE: html_from_results(results)}
    try:
        with BENCH_FOLDER.new(output, force=force) as folder:
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {output.parent}: {error.strerror}; choose another folder with -o") from error
    return tuple(output / name for name in texts)
