"""`effexport bench` as its users meet it, and the engine below it."""

from __future__ import annotations

import csv
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from planted_machine import PlantedMachine

from effexport.bench import candidates
from effexport.bench import run as bench_run
from effexport.bench.grid import Agreement, Grid, models_from_text, results_from_json
from effexport.bench.run import bench
from effexport.bench.timing import Settings

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]
SMALL = ["--heads", "2", "--head-dim", "16", "--rounds", "3", "--threads", "1"]


def small_grid(variants: str = "softmax,linear", runtimes: tuple[str, ...] = ("torch", "ort")) -> Grid:
    models = models_from_text(variants)
    return Grid(models=models, seq_lens=(64, 128), runtimes=runtimes, heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about other things than a busy machine, and may run on one."""
    monkeypatch.setattr(bench_run, "Machine", PlantedMachine)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first size."""
    original = bench_run.Bench.size

    def size(self: Any, cases: Any) -> None:
        if self.rows:
            raise KeyboardInterrupt
        original(self, cases)

    monkeypatch.setattr(bench_run.Bench, "size", size)


@pytest.fixture
def quick() -> Settings:
    return Settings(rounds=3, threads=1, memory=False)


@pytest.mark.slow
def test_every_row_has_parity_timing_floor_and_ratios(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "bench"
    arguments = ["--variants", "softmax,lsh:chunk_length=16", "--seq-lens", "64", "--runtimes", "torch,ort", *SMALL]
    result = cli("bench", *arguments, "-o", output, "--json")
    assert result.code == 0, result.err
    assert len(result.json["rows"]) == 4
    for row in result.json["rows"]:
        assert row["status"] == "measured"
        assert row["parity"]["passed"] is True
        assert row["timing"]["runs"] == 3
        assert row["floor"]["products_ms"] > 0
        assert row["times_softmax"] > 0
        assert row["times_torch"] > 0
        assert row["peak_bytes"] > 0
    softmax = result.json["rows"][0]
    assert (softmax["times_softmax"], softmax["times_torch"]) == (1, 1)
    assert result.json["command"].startswith("effexport bench --variants softmax,lsh:chunk_length=16 --seq-lens 64")
    assert result.json["complete"] is True
    results = results_from_json(output / "results.json")
    assert json.loads(results.to_json()) == result.json
    assert len(list(csv.DictReader((output / "results.csv").read_text().splitlines()))) == 4
    assert "… softmax, 64 tokens on torch: preparing" in result.err
    assert "× floor" in result.err
    assert (
        "exists; choose another folder with -o, or replace it with --force"
        in cli("bench", *arguments, "-o", output).error()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runtimes", "trch"], "--runtimes has 'trch'; did you mean 'torch'?"),
        (["--variants", "lsh:num_hash=4"], "lsh attention has no field 'num_hash'; did you mean 'num_hashes'?"),
        (["--seq-lens", "0"], "--seq-lens has 0; expected positive integers"),
        (["--preset", "linear-blog", "--variants", "lsh"], "--variants and --preset linear-blog"),
        (["--seq-len", "64"], "--seq-len only works with --advise; use --seq-lens"),
        (["--latency-limit", "2s"], "--latency-limit only works with --advise"),
        (["--spec", "model.toml"], "--spec only works with --advise"),
        (["--advise", "--spec", "model.toml"], "no spec file at model.toml"),
        (["--advise", "--seq-len", "0"], "seq_len is 0; expected a positive integer"),
        (["--advise", "--seq-len", "64", "--latency-limit", "200"], "--latency-limit is '200'; expected a time"),
        (["--advise", "--seq-len", "64", "--scope", "core"], "--scope core does not work with --advise"),
        (["--advise", "--seq-len", "64", "--batch", "1,8"], "--batch is '1,8'; --advise works with one value"),
        (["--layers", "3"], "--layers only works with --scope encoder or --advise"),
        (["--dim", "30", "--heads", "4"], "--dim 30 cannot be split into 4 heads of equal size"),
        (["--dim", "32", "--head-dim", "4"], "--dim and --head-dim cannot be combined"),
        (["--advise", "--seq-len", "64", "--memory-limit", "much"], "--memory-limit is 'much'; expected bytes"),
        (["--advise", "--seq-len", "64", "--memory-limit", "2GB", "--no-memory"], "leave --no-memory out"),
        (["--threads", "0"], "--threads is 0; expected at least 1"),
        (["--max-seconds", "-1"], "--max-seconds is -1"),
    ],
)
def test_a_benchmark_that_cannot_be_says_why_and_writes_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli("bench", *arguments).error()
    assert cli("bench", *arguments, "--json").json["exit_code"] == 2
    assert list(tmp_path.iterdir()) == []


def test_advice_measures_on_stdout_and_plans_on_stderr_and_writes_nothing_unasked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--variants", "aft-simple,linear", "--dim", "32", "--heads", "2", "--rounds", "3", "--threads", "1"]
    result = cli("bench", "--advise", "--seq-len", "0.0625k", *arguments, "--memory-limit", "1GB")
    assert result.code == 0, result.err
    assert "plan: one attention layer (width 32, 2 heads), 1 × 64 tokens, fp32; about " in result.err
    assert "on ort, the cheapest first: aft-simple; linear" in result.err
    assert "… linear, 64 tokens on ort: measuring memory" in result.err
    assert " for 64 tokens, measured on this machine, within 1.00 GB." in result.out
    assert "effexport build --variant " in result.out
    assert "use this" in result.out
    assert "different models" in result.out
    assert list(tmp_path.iterdir()) == []


def test_advice_without_any_measurement_exits_with_1_and_says_why(cli: Cli) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = [
        "--advise",
        "--seq-len",
        "64",
        "--variants",
        "linear",
        "--runtimes",
        "torch-cuda",
        "--latency-limit",
        "1s",
    ]
    result = cli("bench", *arguments, "--json")
    assert result.code == 1
    advice = result.json["advice"]
    assert advice["limits"] == {"latency_ms": 1000.0, "memory_bytes": None}
    assert advice["sentences"] == ["Nothing was measured, so there is no advice; the table says why."]
    (candidate,) = advice["candidates"]
    assert (candidate["standing"], candidate["why"]) == ("not measured", "PyTorch sees no NVIDIA GPU here")
    assert advice["build"] is None


@pytest.mark.usefixtures("interrupted")
def test_advice_that_ctrl_c_ends_names_the_best_so_far(cli: Cli) -> None:
    arguments = ["--variants", "linear,softmax", "--dim", "32", "--heads", "2", "--runtimes", "torch", "--no-memory"]
    result = cli("bench", "--advise", "--seq-len", "64", *arguments, "--rounds", "3", "--threads", "1")
    assert result.code == 130
    assert "Use linear on torch: " in result.out
    assert "Interrupted: 1 candidate was not measured." in result.out
    assert "not reached" in result.out


def test_a_gpu_that_is_not_there_is_said_and_is_no_failure_if_another_runtime_works(cli: Cli, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = ["--variants", "softmax", "--seq-lens", "64", "--runtimes", "torch-cuda,torch", *SMALL]
    result = cli("bench", *arguments, "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert {row["case"]["runtime"]: row["status"] for row in result.json["rows"]} == {
        "torch-cuda": "not run",
        "torch": "measured",
    }
    assert "not run: PyTorch sees no NVIDIA GPU here (softmax on torch-cuda at 64 tokens)" in result.err


def test_what_disagrees_is_not_timed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = candidates.agreement

    def damaged(candidate: Any, case: Any, reference: Any) -> Agreement:
        if case.runtime == "ort":
            return Agreement(passed=False, metric="max |error| / RMS", value=0.5, limit=2e-5)
        return healthy(candidate, case, reference)

    monkeypatch.setattr(candidates, "agreement", damaged)
    arguments = ["--variants", "linear", "--seq-lens", "64", "--runtimes", "torch,ort", *SMALL, "--no-memory"]
    result = cli("bench", *arguments, "-o", tmp_path / "out", "--json")
    assert result.code == 1
    good, bad = result.json["rows"]
    assert good["timing"] is not None
    assert (bad["status"], bad["timing"], bad["times_torch"], bad["peak_bytes"]) == ("failed", None, None, None)
    assert bad["parity"]["passed"] is False
    assert "failed: parity: max |error| / RMS 0.5 > 2e-05" in result.err


def test_an_exporter_that_fails_makes_a_failed_row_and_the_others_go_on(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from effexport.base.errors import StageError
    from effexport.cli.bench import exit_code

    def fail(case: Any, path: Path) -> None:
        raise StageError("plain export", "no such operator")

    monkeypatch.setattr(candidates, "naive_onnx_from_case", fail)
    results = bench(small_grid("linear", ("torch", "naive")), quick)
    rows = results.rows
    # that somebody else's exporter fails is a finding, not an error
    assert exit_code(results) == 0
    assert [row.status for row in rows] == ["measured", "failed"] * 2
    assert rows[1].reason == "plain export: no such operator"


def test_what_does_not_fit_into_memory_is_not_begun(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effexport.bench.costs.free_memory_bytes", lambda: 300_000)
    rows = bench(small_grid(runtimes=("torch",)), quick).rows
    assert [(row.case.label, row.case.seq_len, row.status) for row in rows] == [
        ("softmax", 64, "measured"),
        ("linear", 64, "measured"),
        ("softmax", 128, "not run"),
        ("linear", 128, "measured"),
    ]
    assert "this machine has 300 kB free" in rows[2].reason
    # without softmax of this length there is nothing to be faster than
    assert rows[3].times_softmax is None


def interrupting(text: str, number: int = 1) -> Callable[[Any], None]:
    """A listener that presses Ctrl-C when it hears `text` for the n-th time."""
    heard = 0

    def hear(step: Any) -> None:
        nonlocal heard
        heard += text in step.text
        if heard == number:
            heard = -(10**9)
            raise KeyboardInterrupt

    return hear


def test_ctrl_c_keeps_the_rows_that_are_finished(quick: Settings) -> None:
    results = bench(small_grid(runtimes=("torch",)), quick, interrupting("128 tokens on torch: preparing"))
    assert not results.complete
    assert [(row.case.label, row.case.seq_len) for row in results.rows] == [("softmax", 64), ("linear", 64)]
    assert all(row.timing is not None for row in results.rows)


def test_ctrl_c_while_timing_keeps_rows_with_enough_rounds(quick: Settings) -> None:
    settings = Settings(rounds=10, threads=1, memory=False)
    results = bench(small_grid(runtimes=("torch",)), settings, interrupting("round 5 of 10"))
    assert [row.timing.runs for row in results.rows if row.timing] == [5, 5]
    assert not results.complete
    early = bench(small_grid(runtimes=("torch",)), settings, interrupting("round 2 of 10"))
    assert early.rows == ()


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_writes_what_was_measured_and_exits_130(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--variants", "softmax", "--seq-lens", "64,128", "--runtimes", "torch", *SMALL, "--no-memory"]
    result = cli("bench", *arguments, "-o", tmp_path / "out")
    assert result.code == 130
    results = results_from_json(tmp_path / "out" / "results.json")
    assert [row.case.seq_len for row in results.rows] == [64]
    assert not results.complete
    assert "Interrupted; the results so far are above." in result.err


@pytest.mark.parametrize("advise", [(), ("--advise",)])
@pytest.mark.parametrize("moment", ["preparing", "waiting"])
def test_ctrl_c_before_the_first_measurement_writes_nothing_and_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, advise: tuple[str, ...]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    target, name = (bench_run, "wait_until_idle") if moment == "waiting" else (bench_run.Bench, "prepare")
    monkeypatch.setattr(target, name, interrupt)
    length = ["--seq-len" if advise else "--seq-lens", "64"]
    arguments = [*advise, "--variants", "linear", "--heads", "2", "--dim", "32", *length, "--runtimes", "torch"]
    arguments += ["--rounds", "3", "--threads", "1", "--wait-idle", "60", "-o", str(tmp_path / "out")]
    result = cli("bench", *arguments, "--json")
    assert result.code == 130
    message = "Interrupted before anything was measured; nothing was written."
    assert result.json == {"error": message, "exit_code": 130}
    assert message in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_that_fits_nowhere_fails_and_is_announced_as_short(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--seq-lens", "2147483647", "--variants", "linear,softmax", "--runtimes", "torch,ort", *SMALL]
    result = cli("bench", *arguments, "-o", tmp_path / "out", "--json")
    assert result.code == 1
    assert {row["status"] for row in result.json["rows"]} == {"not run"}
    assert "plan: 4 rows; about 3 s; Ctrl-C keeps the results so far" in result.err
    assert "measuring memory" not in result.err


def test_progress_says_how_far_and_how_long() -> None:
    from effexport.bench.grid import Pace, Step
    from effexport.cli._console import time_left

    now: Iterator[float] = iter([0.0, 0.0, 10.0, 20.0])
    steps: list[Step] = []
    pace = Pace(4.0, steps.append, clock=lambda: next(now))
    for text in ("first", "second", "third"):
        pace.say(text)
        pace.pay(1.0)
    assert [(step.text, step.done, step.seconds_left) for step in steps] == [
        ("first", 0.0, None),
        ("second", 1.0, 30.0),
        ("third", 2.0, 20.0),
    ]
    assert (time_left(None), time_left(42.2), time_left(200)) == ("", "about 42 s left", "about 3 min left")


def test_a_benchmark_announces_its_time(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--variants", "linear", "--scope", "encoder", "--layers", "1", "--dim", "32", "--heads", "2"]
    arguments += ["--seq-lens", "64", "--runtimes", "torch", "--rounds", "3", "--threads", "1", "--no-memory"]
    result = cli("bench", *arguments, "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert "plan: 1 row; about " in result.err
    assert result.json["rows"][0]["case"]["encoder"] == {"layers": 1}


@pytest.mark.parametrize("preset", ["linear-blog", "nystrom-table1", "reformer-rounds", "aft-table"])
def test_presets_run_in_part(cli: Cli, tmp_path: Path, preset: str) -> None:
    arguments = ["--preset", preset, "--seq-lens", "64", "--batch", "1", "--runtimes", "torch", *SMALL, "--no-memory"]
    result = cli("bench", *arguments, "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert result.json["preset"] == preset
    assert f"preset {preset}: " in result.err
    assert {row["status"] for row in result.json["rows"]} == {"measured"}
    assert result.json["rounds"] == 3


def test_a_folder_that_another_benchmark_writes_is_refused_before_measuring(cli: Cli, tmp_path: Path) -> None:
    words = "bench --variants aft-simple --seq-lens 8 --heads 1 --runtimes torch --rounds 1 --no-memory -o"
    # the lock of another process: one that is opened apart keeps off this process as well
    with (tmp_path / ".bench.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        ended = cli(*words.split(), tmp_path / "bench")
    assert "is being written by another process" in ended.error(code=2)
    assert "plan:" not in ended.err
