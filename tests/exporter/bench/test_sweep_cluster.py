"""Sweeps on a simulated Ray cluster of three nodes: nodes die, GPUs are missing, artifacts come back."""

from __future__ import annotations

import collections
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep_cells
from sweep_cells import cell_of, notes, pretend, tiny_cells

from effexport.artifact import open_artifact
from effexport.base.errors import UserError
from effexport.bench.cells import ARTIFACT, ATTEMPTS, CELLS, STAGING, Cell, Outcome, Store
from effexport.bench.executors import (
    PIECE_BYTES,
    Attempt,
    CellLimits,
    Executor,
    cluster_executor,
    import_ray,
    local_executor,
)
from effexport.bench.sweep import MAX_LOSSES, Sweep
from effexport.plugins.building.toolchain import gpus_here

# one Ray at a time on this machine
pytestmark = [pytest.mark.requires("ray"), pytest.mark.xdist_group("ray")]
STORE_BYTES = 80 * 2**20
FOUND_DEAD_SECONDS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes: one plain, two with a GPU of sm_90 each, which exist in name only."""
    ray = import_ray()
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = Cluster(initialize_head=True, head_node_args=node_arguments(num_cpus=1))
    for _ in range(2):
        add_gpu_node(made)
    yield made
    made.shutdown()
    assert not ray.is_initialized()


def node_arguments(**more: Any) -> dict[str, Any]:
    return {"object_store_memory": STORE_BYTES, "include_dashboard": False, **more}


def add_gpu_node(cluster: Any) -> Any:
    return cluster.add_node(**node_arguments(num_cpus=1, num_gpus=1, resources={"sm_90": 1}))


@pytest.fixture
def executor(cluster: Any) -> Iterator[Callable[..., Executor]]:
    """(work, wait_seconds) → an executor on the cluster, which is closed after the test."""
    made: list[Executor] = []

    def make(work: Any, wait_seconds: float = 60.0) -> Executor:
        made.append(cluster_executor(cluster.address, CellLimits(), cpus=1, wait_seconds=wait_seconds, work=work))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "out").opened() as opened:
        yield opened


def statuses(store: Store) -> dict[str, list[str]]:
    """The status of every attempt, by cell, as the sweep wrote it down."""
    found: dict[str, list[str]] = {}
    for entry in notes(store.path / ATTEMPTS):
        found.setdefault(entry["cell"], []).append(entry["status"])
    return found


def assert_exactly_once(store: Store, cells: list[Cell], journal: Path) -> None:
    """One folder with a whole artifact and one record per cell, and one attempt that counts; the others were lost."""
    assert sorted(path.name for path in (store.path / CELLS).iterdir()) == sorted(cell.id for cell in cells)
    assert [*(store.path / STAGING).iterdir()] == []
    for cell in cells:
        assert store.finished(cell) is not None
        assert (store.cell_folder(cell) / ARTIFACT / "model.onnx").read_text() == cell.id
    recorded = statuses(store)
    assert recorded.keys() == {cell.id for cell in cells}
    for cell in cells:
        assert recorded[cell.id] == ["lost"] * (len(recorded[cell.id]) - 1) + ["finished"]
    # the nodes' own account: nothing ran that the sweep does not know of, and nothing twice without a loss
    began = collections.Counter(entry["cell"] for entry in notes(journal) if entry["event"] == "began")
    assert all(1 <= began[name] <= len(attempts) for name, attempts in recorded.items())


def kill_when(cluster: Any, node: Any, is_time: Callable[[], bool]) -> threading.Thread:
    """Kill a node, without warning, once `is_time`."""

    def watch() -> None:
        deadline = time.monotonic() + FOUND_DEAD_SECONDS
        while not is_time() and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def running_on(journal: Path, node: Any) -> bool:
    """True if a cell has begun on a node and not ended."""
    count = collections.Counter(entry["event"] for entry in notes(journal) if entry["node"] == node.node_id)
    return count["began"] > count["ended"]


def test_a_node_killed_in_mid_sweep_leaves_every_cell_finished_exactly_once(
    cluster: Any, executor: Any, store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    victim = add_gpu_node(cluster)
    cells = tiny_cells(16, 17, 18, targets=["onnx", "trt"], gpus=["sm_90"])
    killer = kill_when(cluster, victim, lambda: running_on(journal, victim))
    sweep = Sweep(store, executor(functools.partial(pretend, journal=str(journal), seconds=1.5)))
    sweep.run(cells)
    killer.join()
    assert_exactly_once(store, cells, journal)
    assert sum(attempts.count("lost") for attempts in statuses(store).values()) >= 1
    assert sweep.new == {cell.id for cell in cells}
    # those that need a GPU ran where there is one of their kind
    gpu_nodes = {node.node_id for node in cluster.list_all_nodes() if node.node_id != cluster.head_node.node_id}
    on_gpu = [entry["node"] for entry in notes(journal) if "-trt-" in entry["cell"]]
    assert set(on_gpu) <= gpu_nodes | {victim.node_id}


@pytest.mark.soak
def test_a_cell_that_no_node_can_hold_is_not_run_after_a_bounded_wait(
    executor: Any, store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    cells = tiny_cells(16, targets=["onnx", "trt"], gpus=["sm_100"])
    sweep = Sweep(store, executor(functools.partial(pretend, journal=str(journal)), wait_seconds=1.0))
    started = time.monotonic()
    sweep.run(cells)
    assert time.monotonic() - started < FOUND_DEAD_SECONDS
    plain, impossible = cells
    assert store.finished(plain) is not None
    reason = sweep.not_run[impossible.id]
    assert reason.startswith("no node with 1 CPU, 1 GPU and the resource sm_100 within 1 s; the nodes have: ")
    assert "1 CPU 1 GPU 1 sm_90" in reason
    assert store.failed(impossible) is None, "what could not be tried is tried by the next sweep"
    assert {entry["cell"] for entry in notes(journal)} == {plain.id}


@pytest.mark.soak
def test_an_artifact_larger_than_a_message_comes_back_whole(executor: Any, store: Store, tmp_path: Path) -> None:
    (cell,) = tiny_cells(16)
    size = 2 * PIECE_BYTES + 1
    work = functools.partial(pretend, journal=str(tmp_path / "journal"), extra_bytes=size)
    Sweep(store, executor(work)).run([cell])
    folder = store.cell_folder(cell) / ARTIFACT
    assert (folder / "engine" / "large.bin").stat().st_size == size
    assert store.finished(cell) is not None, "publishing compares every file with its checksum"


def test_a_cell_that_kills_its_worker_fails_after_some_attempts_and_others_finish(
    executor: Any, store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    good, bad = tiny_cells(16, 17)

    def work(attempt: Attempt, folder: Path) -> Outcome:
        if cell_of(attempt).spec.model.seq_len == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return pretend(attempt, folder, journal=str(journal))

    Sweep(store, executor(work)).run([good, bad])
    assert statuses(store)[bad.id] == ["lost"] * MAX_LOSSES + ["failed"]
    assert statuses(store)[good.id][-1] == "finished"
    record = store.failed(bad)
    assert record is not None
    assert record.reason.startswith(f"its node or worker was lost {MAX_LOSSES} times, most recently: ")


@pytest.mark.soak
def test_what_a_node_raises_is_the_failure_of_one_cell(executor: Any, store: Store) -> None:
    (cell,) = tiny_cells(16)

    def work(attempt: Attempt, folder: Path) -> Outcome:
        raise ModuleNotFoundError("No module named 'onnxscript'")

    Sweep(store, executor(work)).run([cell])
    record = store.failed(cell)
    assert record is not None
    assert record.reason == "on its node: ModuleNotFoundError: No module named 'onnxscript'"


@pytest.mark.requires("torch", "onnx", "ort")
def test_the_command_builds_on_a_cluster_and_brings_the_artifact_home(
    cluster: Any, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text('variants = ["softmax"]\nseq_lens = [16]\n[build]\nscope = "attention"\ndim = 16\nheads = 2\n')
    done = cli("sweep", file, "-o", out, "--address", cluster.address, "--json")
    assert done.code == 0, done.err
    (cell,) = done.json["cells"]
    assert (cell["status"], cell["parity"], cell["attempts"]) == ("finished", "passed", 1)
    assert open_artifact(out / cell["artifact"]).spec.model.seq_len == 16
    assert f"running on the cluster at {cluster.address}" in done.err
    assert "checking parity" in (out / cell["log"]).read_text()


def test_without_a_cluster_a_sweep_has_a_ray_of_its_own(store: Store, tmp_path: Path) -> None:
    import_ray().cloudpickle.register_pickle_by_value(sweep_cells)
    journal = tmp_path / "journal"
    cells = tiny_cells(16, 17, targets=["onnx", "trt"])
    executor = local_executor(CellLimits(), jobs=2, work=functools.partial(pretend, journal=str(journal)))
    try:
        sweep = Sweep(store, executor)
        sweep.run(cells)
    finally:
        executor.close()
    assert sweep.new == {cell.id for cell in cells if not cell.needs_gpu or gpus_here()}
    if not gpus_here():
        reasons = {sweep.not_run[cell.id] for cell in cells if cell.needs_gpu}
        assert reasons == {"no node with 1 CPU and 1 GPU; the nodes have: 1 × 2 CPU"}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://10.0.0.1:10001", r"--address is ray://10\.0\.0\.1:10001; .* --address auto"),
        ("127.0.0.1:1", r"no Ray cluster at --address 127\.0\.0\.1:1: .*refused; expected host:port"),
        ("127.0.0.1:99999", r"no Ray cluster at --address 127\.0\.0\.1:99999: .*; expected host:port"),
        ("somewhere", r"no Ray cluster at --address somewhere: .*; expected host:port"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_message_at_once(address: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=message):
        cluster_executor(address, CellLimits(), cpus=1, wait_seconds=0)
    assert time.monotonic() - started < FOUND_DEAD_SECONDS


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_nodes_that_die_at_random_times_lose_no_cell_and_double_none(
    cluster: Any, executor: Any, store: Store, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    journal = tmp_path / "journal"
    cells = tiny_cells(*range(16, 26), targets=["onnx", "trt"], gpus=["sm_90"])
    # one node after the other: no cell meets more deaths than it may
    victims = [add_gpu_node(cluster) for _ in range(2)]
    moments = sorted(rng.uniform(1, 12) for _ in victims)
    begin = time.monotonic()
    killers = [
        kill_when(cluster, victim, lambda moment=moment: time.monotonic() - begin > moment)
        for victim, moment in zip(victims, moments, strict=True)
    ]
    Sweep(store, executor(functools.partial(pretend, journal=str(journal), seconds=rng.uniform(0.5, 2)))).run(cells)
    for killer in killers:
        killer.join()
    assert_exactly_once(store, cells, journal)
