"""Stages read the output of compilers, compute-sanitizer and ncu, and do without missing tools."""

from __future__ import annotations

import os
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gpu import building, tools
from gpu.calls import call_bytes
from gpu.device import Device
from gpu.stages import FAILED, NOT_RUN, PASSED, Run

from effexport.plugins.contract import load_contract
from effexport.plugins.ops import OPS

PTXAS = """ptxas info    : Compiling entry function 'effexport_lsh_sort' for 'sm_90'
ptxas info    : Function properties for effexport_lsh_sort
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 4096 bytes smem
"""
NCU = """==PROF== Connected to process 1
8 calls
"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value",\
"Rule Name","Rule Type","Rule Description"
"0","1","sort","(1024, 1, 1)","(32, 1, 1)","Occupancy","Achieved Occupancy","%","48.2","","",""
"0","1","sort","(1024, 1, 1)","(32, 1, 1)","Occupancy","","","","Occupancy","OPT","Too few, ""small"" blocks"
"1","1","attend","(256, 1, 1)","(64, 1, 1)","Speed","Duration","us","7.5","","",""
"""


def test_registers_and_spills_are_read_from_ptxas() -> None:
    assert building.resources(PTXAS) == {
        "effexport_lsh_sort": "0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads; "
        "Used 32 registers, used 1 barriers, 4096 bytes smem"
    }


def test_a_compiler_that_fails_or_hangs_is_an_error_with_its_messages() -> None:
    with pytest.raises(RuntimeError, match="failed: no such file"):
        building.call(["sh", "-c", "echo no such file >&2; exit 1"])
    with pytest.raises(RuntimeError, match="sleep 60 was not done after 1 s"):
        building.call(["sleep", "60"], 1)


def test_metrics_and_findings_of_each_launch_are_read_from_ncu() -> None:
    sort, attend = tools.kernels_from_csv(NCU)
    assert sort["kernel"] == "sort"
    assert sort["metrics"] == {"Occupancy: Achieved Occupancy": "48.2 %"}
    assert sort["rules"] == ['Occupancy: Too few, "small" blocks']
    assert attend["metrics"] == {"Speed: Duration": "7.5 us"}
    assert tools.kernels_from_csv("==ERROR== no counters\n") == []


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [
        ("print('8 calls')", 60, PASSED),
        ("print('8 calls'); raise SystemExit(9)", 60, FAILED),
        ("print('nothing')", 60, FAILED),
        ("import time; time.sleep(600)", 1, NOT_RUN),
    ],
    ids=["clean", "an error was found", "the program did not run", "too slow"],
)
def test_a_sanitizer_passes_only_if_the_program_ran_to_its_end(program: str, seconds: float, status: str) -> None:
    assert tools.checked([sys.executable, "-c", program], seconds=seconds)["status"] == status


def test_the_summary_of_a_sanitizer_is_the_problem() -> None:
    program = "print('8 calls'); print('===== ERROR SUMMARY: 3 errors'); print('bye'); raise SystemExit(9)"
    found = tools.checked([sys.executable, "-c", program], seconds=30)
    assert found["problem"] == "exit status 9: ERROR SUMMARY: 3 errors"
    assert "bye" in found["log"]


def test_a_problem_names_the_call_in_which_it_was_found_first() -> None:
    lines = ("========= COMPUTE-SANITIZER", "call: a, 1", "call: a, 2", "========= Race", "call: a, 3", "3 calls")
    program = f"print({os.linesep.join(lines)!r}); raise SystemExit(9)"
    found = tools.checked([sys.executable, "-c", program], seconds=30)
    assert found["problem"] == "a, 2: exit status 9: 3 calls"


def test_a_sanitizer_that_the_machine_does_not_allow_is_not_a_fault_of_a_kernel() -> None:
    program = "print('call: a, 1'); print('========= Error: Device not supported'); raise SystemExit(9)"
    found = tools.checked([sys.executable, "-c", program], seconds=30)
    assert found["status"] == NOT_RUN
    assert found["problem"].endswith("does not work on this machine: Device not supported")


def test_a_fault_of_one_operator_does_not_hide_those_of_others() -> None:
    good, bad = {"problem": "", "status": PASSED}, {"problem": "b, 2: exit status 9", "status": FAILED}
    result = tools.result_of_tools({("memcheck", "a"): good, ("memcheck", "b"): bad, ("racecheck", "b"): good})
    assert result.status == FAILED
    assert result.summary == "memcheck: b, 2: exit status 9; racecheck: nothing found"


def test_without_compute_sanitizer_the_stage_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = Run(Device(emulated=False), tmp_path, tmp_path, ("lsh_sort",), "")
    assert tools.sanitize(run).status == NOT_RUN


@pytest.fixture
def gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run on a GPU whose tools are scripts in tmp_path."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return Run(Device(emulated=False), tmp_path, tmp_path, ("lsh_sort",), "", end_before=time.time() + 60)


def install(tmp_path: Path, name: str, text: str) -> None:
    """A tool that writes its arguments to a file and prints a text."""
    script = f"#!/bin/sh\necho \"$@\" >> {tmp_path}/{name}.arguments\ncat << 'END'\n{text}END\n"
    (tmp_path / name).write_text(script, encoding="utf-8")
    (tmp_path / name).chmod(0o755)


def test_compute_sanitizer_runs_the_small_calls_under_every_tool(gpu_run: Run, tmp_path: Path) -> None:
    install(tmp_path, "compute-sanitizer", "5 calls\n========= ERROR SUMMARY: 0 errors\n")
    result = tools.sanitize(gpu_run)
    assert result.status == PASSED, result
    assert result.details["tools"]["racecheck"]["lsh_sort"]["summary"] == ["0 errors"]
    lines = (tmp_path / "compute-sanitizer.arguments").read_text().splitlines()
    assert {line.split()[3] for line in lines} == set(tools.TOOLS)
    assert all(line.endswith(f"{tmp_path}/driver {tmp_path}/kernels.so {tmp_path}/lsh_sort.calls 2") for line in lines)
    assert (tmp_path / "lsh_sort.calls").stat().st_size > 5 * 1000 * 4  # the longest case, 6 × 1000 integers


def test_ncu_profiles_the_timed_calls_and_leaves_the_clocks_alone(gpu_run: Run, tmp_path: Path) -> None:
    install(tmp_path, "ncu", NCU)
    result = tools.profile(gpu_run)
    assert (result.status, result.summary) == (PASSED, "2 launches"), result
    (line,) = (tmp_path / "ncu.arguments").read_text().splitlines()
    assert line.startswith("--clock-control none ")
    assert (tmp_path / "timed.calls").stat().st_size > 32 * 32768 * 4  # the size that is timed, not a small one


def test_an_ncu_that_may_not_read_counters_or_takes_too_long_did_not_run(gpu_run: Run, tmp_path: Path) -> None:
    install(tmp_path, "ncu", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    result = tools.profile(gpu_run)
    assert (result.status, result.summary) == (NOT_RUN, "ncu cannot read this GPU's counters: ERR_NVGPUCTRPERM")
    (tmp_path / "ncu").write_text("#!/bin/sh\necho call: lsh_sort, a case\nsleep 60\n", encoding="utf-8")
    result = tools.profile(replace(gpu_run, end_before=time.time() + 3))
    assert (result.status, result.summary) == (NOT_RUN, "ncu had no time left in call 1 of 1")


def test_without_ncu_the_calls_run_and_the_stage_does_not_count_as_run(
    gpu_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    install(tmp_path, "driver", "1 calls\n")
    assert tools.profile(gpu_run).status == NOT_RUN


def test_a_call_is_written_with_its_exact_sizes() -> None:
    check = load_contract(OPS["LSHSort"])
    case = check.small[0]  # 6 rows of one token in one bucket
    texts = [struct.pack("=q", len(text)) + text for text in (b"lsh_sort", case.name.encode())]
    integers = struct.pack("=6q", 3, 3, 6, 1, 1, 0)
    arrays = struct.pack("=3q6i", 1, 0, 24, *[0] * 6) + struct.pack("=5q", 2, 0, 24, 0, 24)
    assert b"".join(call_bytes("lsh_sort", check, case)) == b"".join(texts) + integers + arrays


def test_the_names_of_shared_memory_in_headers_and_sources_are_found() -> None:
    assert {"tile_memory", "shared_counters"} <= set(building.shared_memory_names())
