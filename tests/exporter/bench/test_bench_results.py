"""Results survive JSON and CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from effexport.bench.page import BENCH_FOLDER, COLUMNS, csv_from_results, write_results
from effexport.bench.results import BenchResults, Case, Floor, Parity, Row, Timing, results_from_json
from effexport.errors import UserError


def row_of(label: str, runtime: str, median_ms: float, peak_bytes: int | None = None) -> Row:
    case = Case(
        label=label,
        variant=label.split(",")[0],
        runtime=runtime,
        scope="core",
        seq_len=128,
        batch=2,
        precision="fp32",
        heads=2,
        head_dim=16,
        options={"num_hashes": 4} if label == "lsh, 4 rounds" else {},
    )
    timing = Timing(
        runs=5,
        median_ms=median_ms,
        mean_ms=median_ms,
        deviation_ms=0.5,
        lowest_ms=median_ms / 2,
        highest_ms=2 * median_ms,
        spread_ms=0.25,
    )
    return Row(
        case=case,
        status="measured",
        parity=Parity(passed=True, metric="max |error| / RMS", value=1e-7, limit=2e-5),
        timing=timing,
        floor=Floor(products_ms=0.5, pass_ms=0.5),
        peak_bytes=peak_bytes,
        implementation={"LSHSort": "kernel"},
        times_softmax=2.0,
    )


def results_of(*rows: Row) -> BenchResults:
    return BenchResults(
        rows=rows,
        created="2026-01-02T03:04:05+00:00",
        command="effexport bench",
        rounds=5,
        threads=2,
        machine={"processor": "x"},
        environment={"torch": "2"},
    )


ROWS = (row_of("softmax", "torch", 8.0, 4_000_000), row_of("lsh, 4 rounds", "ort", 2.0, 9_000_000))
NOT_RUN = Row(case=ROWS[0].case, status="not run", reason='needs a GPU, says "somebody"')


def test_results_survive_json(tmp_path: Path) -> None:
    results = results_of(*ROWS, NOT_RUN)
    (tmp_path / "results.json").write_text(results.to_json())
    assert results_from_json(tmp_path / "results.json") == results


@pytest.mark.parametrize("text", [None, "[]", '{"format_version": 2}', "{"])
def test_another_file_is_not_read_as_results(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"results\.json .*expected the results\.json of effexport bench"):
        results_from_json(tmp_path / "results.json")


def test_csv_has_one_flat_line_per_row() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_from_results(results_of(*ROWS, NOT_RUN)))))
    assert list(lines[0]) == list(COLUMNS)
    measured, refused = lines[1], lines[2]
    assert measured["label"] == "lsh, 4 rounds"
    assert measured["options"] == "num_hashes=4"
    assert measured["implementation"] == "LSHSort=kernel"
    assert float(measured["median_ms"]) == 2.0
    assert float(measured["tokens_per_second"]) == 128_000
    assert float(measured["times_floor"]) == 2.0
    assert (refused["status"], refused["reason"], refused["median_ms"]) == ("not run", NOT_RUN.reason, "")


def test_a_folder_is_replaced_only_by_force_and_only_if_it_is_a_benchmark(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "bench"
    results = results_of(*ROWS)
    written = write_results(results, output, force=False)
    assert {path.name for path in written} >= {"results.json", "results.csv"}
    assert list(output.parent.iterdir()) == [output]
    with pytest.raises(UserError, match="exists; choose another folder with -o, or replace it with --force"):
        BENCH_FOLDER.check(output, force=False)
    write_results(results_of(ROWS[0]), output, force=True)
    assert len(results_from_json(output / "results.json").rows) == 1
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "page").write_text("keep")
    with pytest.raises(UserError, match="is not a benchmark, so --force does not replace it"):
        BENCH_FOLDER.check(tmp_path / "thesis", force=True)
    with pytest.raises(UserError, match="is a file"):
        BENCH_FOLDER.check(tmp_path / "thesis" / "page", force=True)
