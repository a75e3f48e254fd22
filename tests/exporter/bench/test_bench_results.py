"""Results survive JSON and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from bench_results import results, row

from effexport.base.errors import UserError
from effexport.bench.grid import BenchRow, results_from_json
from effexport.bench.page import BENCH_FOLDER, COLUMNS, csv_from_results, write_results


def row_of(label: str, runtime: str) -> BenchRow:
    options = {"num_hashes": 4} if label == "lsh, 4 rounds" else {}
    return replace(row(label, 128, runtime, batch=2, options=options), implementation={"LSHSort": "kernel"})


ROWS = (row_of("softmax", "torch"), row_of("lsh, 4 rounds", "ort"))
NOT_RUN = BenchRow(case=ROWS[0].case, status="not run", reason='needs a GPU, says "somebody"')


def test_results_survive_json(tmp_path: Path) -> None:
    found = results((*ROWS, NOT_RUN))
    (tmp_path / "results.json").write_text(found.to_json())
    assert results_from_json(tmp_path / "results.json") == found


@pytest.mark.parametrize("text", [None, "[]", '{"format_version": 2}', "{"])
def test_another_file_is_not_read_as_results(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"results\.json .*expected the results\.json of effexport bench"):
        results_from_json(tmp_path / "results.json")


def test_csv_has_one_flat_line_per_row() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_from_results(results((*ROWS, NOT_RUN))))))
    assert list(lines[0]) == list(COLUMNS)
    measured, refused = lines[1], lines[2]
    assert measured["label"] == "lsh, 4 rounds"
    assert measured["options"] == "num_hashes=4"
    assert measured["implementation"] == "LSHSort=kernel"
    assert float(measured["median_ms"]) == 1.6
    assert float(measured["tokens_per_second"]) == 160_000
    assert float(measured["times_floor"]) == 1.6 / (0.3 * 1.6 + 0.02 * 0.125)
    assert (refused["status"], refused["reason"], refused["median_ms"]) == ("not run", NOT_RUN.reason, "")


def test_a_folder_is_replaced_only_by_force_and_only_if_it_is_a_benchmark(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "bench"
    found = results(ROWS)
    written = write_results(found, output, force=False)
    assert {path.name for path in written} >= {"results.json", "results.csv"}
    assert list(output.parent.iterdir()) == [output]
    with pytest.raises(UserError, match="exists; choose another folder with -o, or replace it with --force"):
        BENCH_FOLDER.check(output, force=False)
    write_results(results(ROWS[:1]), output, force=True)
    assert len(results_from_json(output / "results.json").rows) == 1
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "page").write_text("keep")
    with pytest.raises(UserError, match="is not a benchmark, so --force does not replace it"):
        BENCH_FOLDER.check(tmp_path / "thesis", force=True)
    with pytest.raises(UserError, match="is a file"):
        BENCH_FOLDER.check(tmp_path / "thesis" / "page", force=True)
