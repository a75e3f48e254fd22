"""The folder of a benchmark: results.json, results.csv and report.html, all of them or none."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

from effexport.bench.rendering.csv_text import csv_from_results
from effexport.bench.results import BenchResults
from effexport.errors import UserError

JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
PAGE_MODULE = "effexport.bench.rendering.page"


def check_bench_output(output: Path, *, force: bool) -> None:
    """Refuse an output early, before anything is measured. With `force`, only what a benchmark wrote is replaced."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{output} is a file; expected the path of a folder to create")
    if not force:
        raise UserError(f"{output} exists; choose another folder with -o, or replace it with --force")
    if any(output.iterdir()) and not (output / JSON).is_file():
        raise UserError(f"{output} is not a benchmark, so --force does not replace it; choose another folder with -o")


def write_results(results: BenchResults, output: Path, *, force: bool) -> tuple[Path, ...]:
    """Write all files to a temporary sibling and rename it. Returns their paths. Raises UserError."""
    check_bench_output(output, force=force)
    building = output.parent / f".{output.name}.building-{os.getpid()}"
    old = output.parent / f".{output.name}.replaced-{os.getpid()}"
    texts = texts_of_results(results)
    try:
        building.mkdir(parents=True)
        for name, text in texts.items():
            (building / name).write_text(text, encoding="utf-8")
        if output.exists():
            output.rename(old)
        try:
            building.rename(output)
        except OSError:
            with contextlib.suppress(OSError):
                old.rename(output)
            raise
    except OSError as error:
        raise UserError(f"cannot write to {output.parent}: {error.strerror}; choose another folder with -o") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return tuple(output / name for name in texts)


def texts_of_results(results: BenchResults) -> dict[str, str]:
    texts = {JSON: results.to_json(), CSV: csv_from_results(results)}
    if importlib.util.find_spec(PAGE_MODULE) is not None:
        texts[PAGE] = importlib.import_module(PAGE_MODULE).html_from_results(results)
    return texts
