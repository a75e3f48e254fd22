"""Cells that cost nothing, and what stands for a build of them: for tests of how a sweep runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from effexport.artifact import Manifest, write_manifest
from effexport.bench.cells import ARTIFACT, Cell, Outcome, Store
from effexport.bench.executors import Attempt, CellLimits, process_executor
from effexport.bench.grid import SweepResults
from effexport.bench.page import write_sweep
from effexport.bench.sweep import Sweep, plan_of, results_of_sweep
from effexport.bench.sweep_file import cells_from_document
from effexport.plugins.building.toolchain import Gpu

TINY = {"scope": "attention", "dim": 16, "heads": 2}


def tiny_cells(*seq_lens: int, **axes: Any) -> list[Cell]:
    """Softmax attention of a few channels, one cell per length unless `axes` say more."""
    document = {"variants": ["softmax"], "seq_lens": list(seq_lens), "build": TINY, **axes}
    return cells_from_document(document)


def write_artifact(folder: Path, cell: Cell, extra_bytes: int = 0) -> dict[str, int]:
    """A folder whose manifest is true, with sizes by name."""
    (folder / "engine").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(cell.id.encode())
    (folder / "engine" / "large.bin").write_bytes(os.urandom(extra_bytes))
    entry = {"passed": 1, "failed": 0, "not run": 0, "worst": 1e-6, "limit": 1e-5, "metric": "max |error| / RMS"}
    texts = dict.fromkeys(("effexport_version", "variant", "precision", "weights_sha256", "weights_from"), "")
    lists = {name: [] for name in ("inputs", "outputs", "hash_values", "notes", "engines")}
    objects = {name: {} for name in ("spec", "custom_ops", "environment")}
    parity = {"passed": True, "summary": {"arithmetic": entry}}
    write_manifest(folder, msgspec.convert({**texts, **lists, **objects, "opset": 20, "parity": parity}, Manifest))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def note(journal: Path, **entry: Any) -> None:
    """Append one line at once, from whatever process."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps(entry) + "\n").encode())
    os.close(descriptor)


def notes(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def cell_of(attempt: Attempt) -> Cell:
    return Cell.from_dict(attempt.request["cell"])


def pretend(attempt: Attempt, folder: Path, *, journal: str, seconds: float = 0.0, extra_bytes: int = 0) -> Outcome:
    """Instead of a build: notes in `journal` that it began and that it ended, and takes its time between them."""
    cell = cell_of(attempt)
    where = node_id()
    note(Path(journal), cell=cell.id, event="began", node=where, pid=os.getpid())
    time.sleep(seconds)
    files = write_artifact(folder / ARTIFACT, cell, extra_bytes)
    note(Path(journal), cell=cell.id, event="ended", node=where, pid=os.getpid())
    return Outcome(status="finished", files=files, seconds=seconds, where=f"node {where}")


class PretendedSweep:
    """Runs sweeps of pretended cells in one folder. fails: lengths whose cells fail."""

    def __init__(self, folder: Path, journal: Path) -> None:
        self.store, self.journal = Store(folder), journal
        self.fails: set[int] = set()

    def work(self, attempt: Attempt, folder: Path) -> Outcome:
        cell = cell_of(attempt)
        if cell.spec.model.seq_len in self.fails:
            note(self.journal, cell=cell.id, event="began")
            return Outcome(status="failed", reason="parity: 3 of 9 checks failed", stage="parity", log="line 1\nline 2")
        return pretend(attempt, folder, journal=str(self.journal))

    def run(
        self, cells: list[Cell], *, retry_failed: bool = False, gpus: tuple[Gpu, ...] = (), **known: Any
    ) -> SweepResults:
        """known: fields of the results."""
        plan = plan_of(self.store, cells, cells, retry_failed=retry_failed)
        known = {"command_of_cell": "again {}".format, "name": "test", "command": "effexport sweep", **known}
        with self.store.opened():
            executor = process_executor(CellLimits(), 2, self.work, gpus)
            sweep = Sweep(self.store, executor)
            sweep.run(plan.to_run)
            results = results_of_sweep(plan, self.store, sweep, **known)
            write_sweep(results, self.store.path)
        return results

    @property
    def began(self) -> list[str]:
        return [entry["cell"] for entry in notes(self.journal) if entry["event"] == "began"]


def node_id() -> str:
    try:
        import ray

        return ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
    except ImportError:
        return "here"
