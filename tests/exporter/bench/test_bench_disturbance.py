"""A benchmark on a busy machine makes no claim that an idle one might contradict."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_results import LENGTHS, PASSED, html_from_results, results, row
from planted_machine import PlantedMachine

from effexport.base.machine import CoreUse
from effexport.bench import run as bench_run
from effexport.bench.findings import crossovers, curves, disturbance, headlines, problems, verdict
from effexport.bench.grid import BenchResults, BenchRow, Disturbance, Floor, Grid, Model, results_from_json
from effexport.bench.page import bench_chart, csv_from_results, document_from_results
from effexport.bench.run import bench
from effexport.bench.timing import LEAST_TIMES_FLOOR, NO_WAITS, NOTHING_KNOWN, Settings
from effexport.render.formats import print_document

Cli = Callable[..., Any]
REASON = "its threads had to wait for a core in too many rounds; other programs used 1.2 of 2 cores"


def disturbed(one: BenchRow) -> BenchRow:
    known = Disturbance(kept=1, dropped=14, waited_share=0.8, own_cores=0.9, other_cores=1.2345, stolen_cores=0.0)
    return replace(one, status="disturbed", reason=REASON, times_softmax=None, times_torch=None, disturbance=known)


def busy_results(is_busy: Callable[[BenchRow], bool]) -> BenchResults:
    """The usual results, in which some rows were disturbed."""
    return results(tuple(disturbed(one) if is_busy(one) else one for one in results().rows))


def longest_linear_on_ort(one: BenchRow) -> bool:
    return (one.case.label, one.case.runtime, one.case.seq_len) == ("linear", "ort", LENGTHS[-1])


# ---- rows


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> PlantedMachine:
    planted = PlantedMachine()
    monkeypatch.setattr(bench_run, "Machine", lambda: planted)
    return planted


def small(machine: PlantedMachine, *, threads: int = 1) -> tuple[BenchRow, ...]:
    """A small benchmark on a planted machine."""
    grid = Grid(models=(Model("softmax"), Model("linear")), seq_lens=(64,), runtimes=("torch",), heads=2, head_dim=16)
    return bench(grid, Settings(rounds=3, threads=threads, memory=False)).rows


needs_torch = pytest.mark.requires("torch", "onnx", "ort")


@needs_torch
def test_an_idle_machine_disturbs_nothing(machine: PlantedMachine) -> None:
    for one in small(machine):
        assert (one.status, one.reason, one.note, one.is_quotable) == ("measured", "", "", True)
        assert one.disturbance is not None
        assert (one.disturbance.kept, one.disturbance.dropped, one.disturbance.waited_share) == (3, 0, 0)


@needs_torch
def test_a_row_whose_threads_always_waited_has_no_ratio_and_gives_none(
    machine: PlantedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from effexport.bench.candidates import TorchCandidate

    run = TorchCandidate.run
    monkeypatch.setattr(machine, "use_since", lambda start: CoreUse(1.2, 0.0))

    def waiting_run(self: TorchCandidate) -> None:
        run(self)
        if self._case.label == "softmax":
            assert machine.waited is not None
            machine.waited += 1.0

    monkeypatch.setattr(TorchCandidate, "run", waiting_run)
    softmax, linear = small(machine)
    assert (softmax.status, softmax.is_quotable, softmax.tokens_per_second) == ("disturbed", False, None)
    assert softmax.reason.startswith(
        "its threads had to wait for a core in too many rounds; other programs used 1.2 of"
    )
    assert (softmax.times_softmax, softmax.times_torch, softmax.times_floor) == (None, None, None)
    assert softmax.timing is not None
    assert softmax.disturbance is not None
    assert (softmax.disturbance.kept, softmax.disturbance.dropped) == (0, 3)
    assert (linear.status, linear.times_torch, linear.times_softmax) == ("measured", 1, None)


@needs_torch
@pytest.mark.parametrize(
    ("use", "waits", "threads", "reason", "note"),
    [
        (CoreUse(1.2, 0.0), 0.0, 1, "", ""),
        (CoreUse(0.0, 0.3), 0.0, 1, "the host of this virtual machine took 0.3 of 2 cores", ""),
        (CoreUse(0.0, 0.09), 0.0, 1, "", ""),
        (CoreUse(1.2, 0.0), None, 1, "other programs used 1.2 of 2 cores", NO_WAITS),
        (CoreUse(0.09, 0.0), None, 1, "", NO_WAITS),
        (CoreUse(1.2, 0.0), 0.0, 4, "other programs used 1.2 of 2 cores", NO_WAITS),
        (None, None, 1, "", NOTHING_KNOWN),
    ],
)
def test_what_the_system_tells_decides_and_what_it_does_not_is_noted(
    machine: PlantedMachine,
    monkeypatch: pytest.MonkeyPatch,
    use: CoreUse | None,
    waits: float | None,
    threads: int,
    reason: str,
    note: str,
) -> None:
    machine.waited = waits
    monkeypatch.setattr(machine, "use_since", lambda start: use)
    for one in small(machine, threads=threads):
        assert (one.reason, one.note) == (reason, note)
        assert one.is_quotable == (not reason)


@needs_torch
@pytest.mark.parametrize(("share", "is_quotable"), [(0.006, False), (1.05 * LEAST_TIMES_FLOOR, True)])
def test_a_row_far_below_its_floor_is_not_quoted(
    machine: PlantedMachine, monkeypatch: pytest.MonkeyPatch, share: float, is_quotable: bool
) -> None:
    times_floor = property(lambda row: None if row.floor is None else share)
    monkeypatch.setattr(BenchRow, "times_floor", times_floor)
    for one in small(machine):
        assert one.is_quotable == is_quotable
        assert ("less than 0.3 of its floor" in one.reason) == (not is_quotable)


# ---- what is said


def test_no_model_is_the_fastest_where_one_was_disturbed() -> None:
    found = headlines(busy_results(longest_linear_on_ort))
    (on_ort,) = (sentence for sentence in found if " on ort," in sentence)
    assert on_ort == ("At 8,192 tokens on ort, other programs disturbed the timings, so no model is named the fastest.")
    assert sum("is the fastest" in sentence for sentence in found) == 2


def test_curves_with_a_disturbed_length_are_not_compared() -> None:
    found = busy_results(lambda one: longest_linear_on_ort(one) or one.case.runtime == "torch")
    said = {(curve.label, curve.place): text for curve, text in crossovers(curves(found))}
    wrong = "not compared: other programs disturbed the timings"
    assert {place for place, text in said.items() if text == wrong} == {
        ("linear", "ort"),
        *((label, "torch") for label in ("linear", "nystrom-64", "lsh, 4 rounds")),
    }
    assert said["nystrom-64", "ort"] == "faster from about 1,024 tokens on"
    # softmax on ort is fine, but the baseline of all on torch was disturbed
    only_softmax = busy_results(lambda one: one.case.label == "softmax" and one.case.seq_len == 512)
    assert {text for _, text in crossovers(curves(only_softmax))} == {wrong}


def test_a_busy_machine_is_said_on_the_page_and_concludes_nothing() -> None:
    found = busy_results(lambda one: True)
    banner = disturbance(found)
    assert banner.startswith("Other programs, which used up to 1.2 of 2 cores, disturbed 60 of 60 rows. No ratio")
    page = html_from_results(found)
    assert f'<p class="verdict disturbed">{banner}</p>' in page
    assert "is the fastest" not in page
    assert "times as fast" not in page
    assert bench_chart(found, ["latency"]) is None
    assert verdict(found) == "passed", "the results are right, only their timings are not known"
    assert [problem.status for problem in problems(found)] == ["disturbed"]
    assert f"{REASON}; its median was 12.8 ms" in page
    assert disturbance(results()) == ""
    alone = disturbance(replace(found, rows=found.rows[:1]))
    assert "disturbed the only row. No ratio, rank or crossover is derived from this row." in alone
    assert 'class="verdict disturbed"' not in html_from_results(results())


def test_a_disturbed_row_keeps_its_timing_for_the_record(tmp_path: Path) -> None:
    found = busy_results(longest_linear_on_ort)
    (tmp_path / "results.json").write_text(found.to_json())
    assert results_from_json(tmp_path / "results.json") == found
    (line,) = (line for line in csv_from_results(found).splitlines() if ",disturbed," in line)
    assert ",12.8," in line
    assert line.endswith("1,14,0.8,0.9,1.2345,0.0")


def test_the_terminal_shows_the_median_of_a_disturbed_row_and_no_ratio() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    print_document(console, document_from_results(busy_results(longest_linear_on_ort)))
    text = console.export_text()
    assert "disturbed 1 of 60 rows" in text
    (line,) = (line for line in text.splitlines() if " disturbed: 12.8 ms  " in line)
    assert line.count("–") >= 4
    assert f"disturbed: {REASON} (linear on ort at 8,192 tokens)" in text


@needs_torch
def test_waiting_for_an_idle_machine_is_bounded_and_said(cli: Cli, tmp_path: Path, machine: PlantedMachine) -> None:
    arguments = ["--variants", "softmax", "--seq-lens", "64", "--runtimes", "torch", "--rounds", "1", "--no-memory"]
    machine.others = 1.0
    ticks = iter(range(10**6))
    machine.clock = lambda: float(next(ticks))
    result = cli("bench", *arguments, "--wait-idle", "0.01", "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert "… the machine is still not idle: other programs use 1.0 of 2 cores; measuring now" in result.err
    assert "expected a number of seconds above 0" in cli("bench", *arguments, "--wait-idle", "0").error()


def test_waiting_needs_a_system_that_tells_what_others_do(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from effexport.base import machine as readings

    monkeypatch.setattr(readings, "STAT", Path("/nowhere/stat"))
    message = cli("bench", "--variants", "softmax", "--wait-idle").error()
    assert message.startswith("--wait-idle needs /nowhere/stat, which this system does not have")


def test_rows_of_an_older_version_may_be_quoted() -> None:
    old = BenchRow(case=row("linear", 512).case, status="measured", parity=PASSED, timing=row("linear", 512).timing)
    assert old.is_quotable
    assert replace(old, floor=Floor(products_ms=1.0, pass_ms=1.0)).times_floor == pytest.approx(0.4)
