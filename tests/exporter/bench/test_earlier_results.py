"""Folders of benchmarks and sweeps that an earlier commit wrote: they are read as they were, and a sweep goes on.

tests/corpus/e23d9acc-results.tar.xz has `bench/`, the results of a benchmark, and `sweep/`, the folder of sweep.toml
after it was run for 8 tokens and then, with a limit that every artifact exceeds, for softmax of 9 tokens.
"""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path

import pytest
from golden_runs import CORPUS
from sweep_cells import PretendedSweep, notes

from effexport.bench import sweep_file as cells_module
from effexport.bench.cells import ATTEMPTS
from effexport.bench.grid import results_from_json
from effexport.bench.page import csv_from_results
from effexport.bench.sweep import plan_of
from effexport.bench.sweep_file import cells_from_path

STATES = {"softmax-8": "finished", "softmax-9": "failed", "linear-8": "finished", "linear-9": "to run"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(CORPUS / "e23d9acc-results.tar.xz") as members:
        members.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_benchmark_is_read_and_written_as_it_was(folder: Path) -> None:
    results = results_from_json(folder / "bench" / "results.json")
    assert results.to_json() == (folder / "bench" / "results.json").read_text()
    assert csv_from_results(results) == (folder / "bench" / "results.csv").read_bytes().decode()
    assert [row.status for row in results.rows].count("not run") == 4


def test_a_sweep_goes_on_where_it_stopped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = PretendedSweep(folder / "sweep", tmp_path / "journal")
    store = machine.store
    before = json.loads((store.path / "results.json").read_text())
    # the cells are of the versions that were installed then
    (record, *_) = store.path.glob("cells/*/record.json")
    versions = json.loads(record.read_text())["versions"]
    monkeypatch.setattr(cells_module, "deciding_versions", lambda target: versions)
    cells = cells_from_path(folder / "sweep.toml")
    assert [cell.id for cell in cells] == [cell["id"] for cell in before["cells"]]

    plan = plan_of(store, cells, cells, retry_failed=False)
    assert {cell_name(name): state for name, state in plan.states.items()} == STATES

    known = {name: before[name] for name in ("name", "command", "where", "seconds", "complete")}
    machine.run(cells, command_of_cell="effexport sweep sweep.toml -o sweep --only {}".format, **known)
    assert [cell_name(cell) for cell in machine.began] == ["linear-9"]
    assert [entry["status"] for entry in notes(store.path / ATTEMPTS)] == ["finished"] * 2 + ["failed", "finished"]
    after = json.loads((store.path / "results.json").read_text())
    assert after.keys() == before.keys()
    assert after["summary"] == {"finished": 3, "failed": 1, "not run": 0}
    for old, new in zip(before["cells"], after["cells"], strict=True):
        assert old.keys() == new.keys()
        if cell_name(old["id"]) != "linear-9":
            assert new == old | {"is_new": False}
    lines = csv.DictReader((store.path / "results.csv").read_text().splitlines())
    assert [line["id"] for line in lines] == [cell.id for cell in cells]


def cell_name(name: str) -> str:
    """`linear-8` of `linear-8-fp32-onnx-4045bdc9d890`."""
    return name.partition("-fp32")[0]
