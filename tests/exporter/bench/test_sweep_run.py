"""A sweep's run, whatever its cells build: skipped and repeated cells, and the contents of its folder."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_cells import PretendedSweep, cell_of, notes, pretend, tiny_cells, write_artifact

from effexport.base.errors import EffexportError, UserError
from effexport.bench.cells import ARTIFACT, ATTEMPTS, RECORD, STAGING, Cell, Outcome, Store
from effexport.bench.executors import (
    Attempt,
    CellLimits,
    Executor,
    FilePiece,
    add_piece,
    pieces_of_folder,
    process_executor,
)
from effexport.bench.grid import Step
from effexport.bench.sweep import MAX_LOSSES, Sweep
from effexport.plugins.building.toolchain import Gpu, parse_gpus


@pytest.fixture
def machine(tmp_path: Path) -> PretendedSweep:
    return PretendedSweep(tmp_path / "out", tmp_path / "journal")


def test_finished_cells_are_not_run_again_and_a_new_length_runs_alone(machine: PretendedSweep) -> None:
    first = machine.run(tiny_cells(16, 17))
    assert [row.status for row in first.rows] == ["finished", "finished"]
    assert all(row.is_new for row in first.rows)
    more = tiny_cells(15, 17, 16)
    second = machine.run(more)
    assert machine.began[2:] == [more[0].id]
    assert [row.status for row in second.rows] == ["finished"] * 3
    assert [row.is_new for row in second.rows] == [True, False, False]
    assert second.sentence == "3 cells: 3 finished (1 now, 2 before)"
    assert machine.run(more).sentence == "3 cells: 3 finished (all before)"
    assert len(machine.began) == 3


def test_a_failure_is_one_row_with_its_reason_and_is_repeated_only_on_request(machine: PretendedSweep) -> None:
    cells = tiny_cells(16, 17, 18)
    machine.fails = {17}
    results = machine.run(cells)
    assert [row.status for row in results.rows] == ["finished", "failed", "finished"]
    failed = results.rows[1]
    assert (failed.reason, failed.log_tail) == ("parity: 3 of 9 checks failed", "line 1\nline 2")
    assert failed.command == f"again {cells[1].id}"
    assert (machine.store.path / failed.log).read_text() == "line 1\nline 2\n"
    assert not machine.store.cell_folder(cells[1]).exists()
    machine.run(cells)
    assert machine.began.count(cells[1].id) == 1
    machine.fails = set()
    healed = machine.run(cells, retry_failed=True)
    assert [row.status for row in healed.rows] == ["finished"] * 3
    assert machine.began.count(cells[1].id) == 2
    assert not machine.store.failed_folder(cells[1]).exists()


@pytest.mark.parametrize("damage", ["model.onnx", "manifest.json", RECORD, "whole artifact"])
def test_a_damaged_cell_is_built_again(machine: PretendedSweep, damage: str) -> None:
    cells = tiny_cells(16, 17)
    machine.run(cells)
    folder = machine.store.cell_folder(cells[0])
    if damage == "whole artifact":
        shutil.rmtree(folder / ARTIFACT)
    else:
        (folder / damage if damage == RECORD else folder / ARTIFACT / damage).write_text("{")
    assert machine.store.finished(cells[0]) is None
    machine.run(cells)
    assert machine.began == [cells[0].id, cells[1].id, cells[0].id] or sorted(machine.began[:2]) == sorted(
        cell.id for cell in cells
    )
    assert machine.began.count(cells[0].id) == 2
    assert machine.store.finished(cells[0]) is not None


def test_of_two_attempts_at_once_the_first_stays_and_the_other_is_discarded(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    (cell,) = tiny_cells(16)
    with store.opened():
        staged = [store.staging(cell) for _ in range(8)]
        outcomes = []
        for number, folder in enumerate(staged):
            files = write_artifact(folder / ARTIFACT, cell, extra_bytes=number + 1)
            outcomes.append(Outcome(status="finished", files=files, where=f"node {number}"))
        wins: list[int] = []
        barrier = threading.Barrier(len(staged))

        def publish(number: int) -> None:
            barrier.wait()
            if store.publish(cell, staged[number], number, outcomes[number]):
                wins.append(number)

        threads = [threading.Thread(target=publish, args=(number,)) for number in range(len(staged))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = wins
        record = store.finished(cell)
        assert record is not None
        assert record.where == f"node {winner}"
        large = store.cell_folder(cell) / ARTIFACT / "engine" / "large.bin"
        assert large.stat().st_size == winner + 1, "record and artifact are those of one attempt"
        recorded = sorted(entry["status"] for entry in notes(store.path / ATTEMPTS))
        assert recorded == ["discarded"] * 7 + ["finished"]
    assert [*(store.path / STAGING).iterdir()] == []


def test_an_artifact_that_is_not_what_its_manifest_says_is_a_failure(machine: PretendedSweep) -> None:
    (cell,) = tiny_cells(16)

    def work(attempt: Attempt, folder: Path) -> Outcome:
        outcome = pretend(attempt, folder, journal=str(machine.journal))
        (folder / ARTIFACT / "model.onnx").write_bytes(b"x" * len(cell.id))
        return outcome

    machine.work = work  # type: ignore[method-assign]
    (row,) = machine.run([cell]).rows
    assert row.status == "failed"
    assert "its artifact did not arrive completely" in row.reason
    assert "model.onnx does not match its checksum" in row.reason


def test_what_a_build_raises_fails_its_cell_and_no_other(machine: PretendedSweep) -> None:
    def work(attempt: Attempt, folder: Path) -> Outcome:
        if cell_of(attempt).spec.model.seq_len == 16:
            raise OSError("No space left on device")
        return pretend(attempt, folder, journal=str(machine.journal))

    machine.work = work  # type: ignore[method-assign]
    results = machine.run(tiny_cells(16, 17))
    assert [row.status for row in results.rows] == ["failed", "finished"]
    assert results.rows[0].reason == "OSError: No space left on device"


def test_a_cell_for_a_gpu_runs_on_its_own_or_is_not_run(machine: PretendedSweep) -> None:
    cells = tiny_cells(16, 17, targets=["trt"], gpus=["sm_89", "sm_90"])
    seen: list[tuple[str, str]] = []

    def work(attempt: Attempt, folder: Path) -> Outcome:
        seen.append((cell_of(attempt).gpu, attempt.environment["CUDA_VISIBLE_DEVICES"]))
        return pretend(attempt, folder, journal=str(machine.journal))

    machine.work = work  # type: ignore[method-assign]
    results = machine.run(cells, gpus=(Gpu("GPU-a", "sm_90"),))
    assert [row.status for row in results.rows] == ["not run", "finished"] * 2
    assert seen == [("sm_90", "GPU-a")] * 2
    assert results.rows[0].reason.startswith("no node with a GPU of sm_89: the GPUs of this machine are sm_90")
    assert not machine.store.failed_folder(cells[0]).exists()


def test_gpus_are_those_that_nvidia_smi_lists_and_this_process_may_use() -> None:
    text = "0, GPU-aaaa, 9.0\n1, GPU-bbbb, 12.0\n2, GPU-cccc, [N/A]\n"
    both = (Gpu("GPU-aaaa", "sm_90"), Gpu("GPU-bbbb", "sm_120"))
    assert parse_gpus(text, None) == both
    assert parse_gpus(text, "1") == both[1:]
    assert parse_gpus(text, "GPU-aa") == both[:1]
    assert parse_gpus(text, "") == ()


def losing_executor(losses: int) -> Executor:
    """Loses the first attempts, one after the other."""
    left = iter(range(losses))

    def run(cell: Cell, folder: Path, started: Any, is_cancelled: Any) -> Outcome:
        if next(left, None) is not None:
            return Outcome(status="lost", reason="NodeDiedError: it is gone")
        return Outcome(status="finished", files=write_artifact(folder / ARTIFACT, cell))

    return Executor("a bad cluster", 1, run)


@pytest.mark.parametrize("losses", [MAX_LOSSES - 1, MAX_LOSSES])
def test_a_cell_that_is_lost_begins_again_and_not_for_ever(tmp_path: Path, losses: int) -> None:
    store = Store(tmp_path / "out")
    (cell,) = tiny_cells(16)
    with store.opened():
        Sweep(store, losing_executor(losses)).run([cell])
        recorded = [entry["status"] for entry in notes(store.path / ATTEMPTS)]
        assert recorded == ["lost"] * losses + ["finished" if losses < MAX_LOSSES else "failed"]
        assert (store.finished(cell) is not None) == (losses < MAX_LOSSES)
        assert [*(store.path / STAGING).iterdir()] == []


def test_the_time_left_follows_the_pace_so_far(tmp_path: Path) -> None:
    now = iter(float(second) for second in range(0, 1000, 10))
    news: list[Step] = []
    with (store := Store(tmp_path / "out")).opened():
        Sweep(store, losing_executor(0), news.append, clock=lambda: next(now)).run(tiny_cells(16, 17, 18, 19))
    assert [(one.done, one.total, one.seconds_left) for one in news] == [
        (1, 4, 30),
        (2, 4, 20),
        (3, 4, 10),
        (4, 4, None),
    ]


def test_a_folder_belongs_to_one_sweep_at_a_time(tmp_path: Path) -> None:
    """Also one that is a volume below a folder that nobody may write: the lock is inside."""
    store = Store(tmp_path / "out")
    store.path.mkdir()
    # the lock of another process: one that is opened apart keeps off this process as well
    with (store.path / ".sweep.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"is being written by another process; wait until it"), store.opened():
            pass
    with store.opened():
        pass


def test_a_sweep_that_was_killed_before_it_left_its_mark_is_begun_again(tmp_path: Path) -> None:
    for name in ("cells", "failed", ".staging"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / ".sweep.json.partial-1-1").touch()
    with Store(tmp_path / "out").opened():
        assert (tmp_path / "out" / "sweep.json").is_file()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", "mine", "is not the output of a sweep, and not empty"),
        ("sweep.json", '{"format_version": 99}', "format version 99; this effexport reads up to 1"),
        ("sweep.json", "[", "is damaged"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        Store(tmp_path).check()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_results_are_the_same_in_json_csv_and_page(machine: PretendedSweep) -> None:
    machine.fails = {17}
    results = machine.run(tiny_cells(16, 17))
    folder = machine.store.path
    assert (folder / "results.json").read_text() == results.to_json()
    values = json.loads((folder / "results.json").read_text())
    assert values["summary"] == {"finished": 1, "failed": 1, "not run": 0}
    lines = (folder / "results.csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("id,label,variant,scope,seq_len,batch,precision,target,gpu,status,")
    row = results.rows[0]
    assert (row.parity, row.worst_error, row.error_limit) == ("passed", 1e-6, 1e-5)
    for path in (row.artifact, row.log):
        assert (folder / path).exists()


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_pieces_make_the_same_folder_again(tmp_path: Path, piece_bytes: int) -> None:
    (cell,) = tiny_cells(16)
    sizes = write_artifact(tmp_path / "one", cell, extra_bytes=500)
    (tmp_path / "one" / "empty").touch()
    sizes["empty"] = 0
    for piece in pieces_of_folder(tmp_path / "one", piece_bytes):
        assert len(piece.data) <= piece_bytes
        add_piece(tmp_path / "two", piece, sizes)
    for name in sizes:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (FilePiece("../escaped", b"x"), "not part of the artifact"),
        (FilePiece("/etc/escaped", b"x"), "not part of the artifact"),
        (FilePiece("other", b"x"), "not part of the artifact"),
        (FilePiece("model.onnx", b"12345"), "sent 5 bytes of model.onnx; it announced 4"),
    ],
)
def test_pieces_that_were_not_announced_are_refused(tmp_path: Path, piece: FilePiece, message: str) -> None:
    expected = {"model.onnx": 4, "../escaped": 1, "/etc/escaped": 1}
    with pytest.raises(EffexportError, match=message):
        add_piece(tmp_path / "two", piece, expected)
    assert not (tmp_path / "escaped").exists()


def test_an_interrupt_ends_what_runs_and_records_none_of_it(tmp_path: Path) -> None:
    begun: list[str] = []

    def work(attempt: Attempt, folder: Path) -> Outcome:
        begun.append(cell_of(attempt).id)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while not attempt.is_cancelled():
            time.sleep(0.01)
        return Outcome(status="failed", reason="cancelled")

    cells = tiny_cells(16, 17)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which the processes of xdist ignore
    with (store := Store(tmp_path / "out")).opened():
        try:
            with pytest.raises(KeyboardInterrupt):
                Sweep(store, process_executor(CellLimits(), 1, work, ())).run(cells)
        finally:
            signal.signal(signal.SIGINT, before)
        assert begun == [cells[0].id]
        assert not (store.path / ATTEMPTS).exists()
