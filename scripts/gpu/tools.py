"""Two stages that run the program of native/driver.cc under NVIDIA's tools, with calls in files.

sanitizing: compute-sanitizer over calls of every kernel with small sizes. memcheck finds accesses outside of arrays,
racecheck two threads at the same shared memory without a barrier between them, initcheck reads of memory that nothing
has written. In the rehearsal the same program and calls run under AddressSanitizer, which finds the first kind alone;
tests/plugins/test_cuda_races.py finds the second without a GPU.

profiling: ncu over one launch of each kernel at the sizes that are timed: what it measured, and what its rules say
about it. In the rehearsal the same program runs smaller calls by itself.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from effexport.base.environment import usable_cores
from gpu.building import SANITIZER, driver_path, emulating_toolchain, library_path, make_driver, make_library
from gpu.calls import write_calls
from gpu.device import FEW_BLOCKS
from gpu.programs import run_program
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run, worst_of

LOG_CHARACTERS = 20_000
# by name, with their options
TOOLS = {"memcheck": ("--leak-check", "full"), "racecheck": ("--racecheck-report", "all"), "initcheck": ()}
EMULATED_TOOL = "AddressSanitizer"
ERROR_EXIT = 9
# what compute-sanitizer says where the machine's virtualisation keeps it from the GPU
UNSUPPORTED = "Device not supported"
# --clock-control none: ncu must not change the clocks of a card that is shared
NCU = ("ncu", "--clock-control", "none", "--set", "detailed", "--csv", "--page", "details")
# what it says without permission, or where the machine's virtualisation keeps it from the GPU
REFUSALS = ("ERR_NVGPUCTRPERM", "Failed to initialize the profiler")


def sanitize(run: Run) -> Result:
    """Every tool over every operator, in processes of their own: a fault may end its process.

    With few blocks, because racecheck sees nothing between two items of a block that takes one.
    """
    if not run.device.emulated and not shutil.which("compute-sanitizer"):
        return Result(NOT_RUN, "compute-sanitizer is missing; expected it on PATH, as the CUDA toolkit installs it", {})
    programs = {}
    for op, check in run.contracts.items():
        calls = run.work / f"{op}.calls"
        write_calls(calls, ((op, check, case) for case in check.small))
        programs[op] = [str(driver_path(run)), str(library_path(run)), str(calls), str(FEW_BLOCKS)]
    commands = emulated_commands(run, programs) if run.device.emulated else sanitizer_commands(programs)
    # each of the processes leaves most of a GPU idle
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = pool.map(lambda command: checked(command, run.seconds_left), commands.values())
        return result_of_tools(dict(zip(commands, found, strict=True)))


def sanitizer_commands(programs: dict[str, list[str]]) -> dict[tuple[str, str], list[str]]:
    """The programs of the operators under compute-sanitizer, by tool and operator."""
    start = ["compute-sanitizer", "--error-exitcode", str(ERROR_EXIT), "--tool"]
    return {
        (tool, op): [*start, tool, *options, *program]
        for tool, options in TOOLS.items()
        for op, program in programs.items()
    }


def emulated_commands(run: Run, programs: dict[str, list[str]]) -> dict[tuple[str, str], list[str]]:
    """The same calls under the compiler's AddressSanitizer."""
    folder = run.work / "sanitized"
    folder.mkdir(exist_ok=True)
    make_library(run, emulating_toolchain(*SANITIZER), folder / "kernels.so", run.ops)
    make_driver(run, folder / "driver", *SANITIZER)
    # arrays that are freed after a failure only are not leaks
    start = ["env", "ASAN_OPTIONS=detect_leaks=0", str(folder / "driver"), str(folder / "kernels.so")]
    return {(EMULATED_TOOL, op): [*start, *rest] for op, (_, _, *rest) in programs.items()}


def checked(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """One tool over one operator's calls, as JSON. problem: in which call, and what, or an empty text."""
    if seconds <= 0:
        return {"problem": "not begun: no time was left", "status": NOT_RUN, "log": ""}
    try:
        done = run_program(command, seconds)
    except subprocess.TimeoutExpired as error:
        output = str(error.stdout)
        problem = f"{place(output)}not finished after {seconds:.0f} s"
        return {"problem": problem, "status": NOT_RUN, "log": output[-LOG_CHARACTERS:]}
    log = (done.stdout + done.stderr)[-LOG_CHARACTERS:]
    ran = re.search(r"^\d+ calls$", done.stdout, re.MULTILINE)
    summary = re.findall(r"ERROR SUMMARY: (.*)|(\d+ hazards? displayed.*)", log)
    # what the tools say last, or the program
    last = [line.strip("= ") for line in log.splitlines() if "SUMMARY" in line] or [last_line(log)]
    clean = done.returncode == 0 and ran
    problem = "" if clean else f"{place(done.stdout)}exit status {done.returncode}: {last[-1]}"
    if UNSUPPORTED in log:
        problem = f"{command[0]} does not work on this machine: {UNSUPPORTED}"
    return {
        "problem": problem,
        "status": NOT_RUN if UNSUPPORTED in log else FAILED if problem else PASSED,
        "summary": ["".join(parts) for parts in summary],
        "log": log if problem else "",
    }


def place(output: str) -> str:
    """The call during which compute-sanitizer first reported something, or the last one, and a colon."""
    call = ""
    for line in output.splitlines():
        if line.startswith("call: "):
            call = f"{line.removeprefix('call: ')}: "
        elif line.startswith("=====") and call:
            break
    return call


def result_of_tools(found: dict[tuple[str, str], dict[str, Any]]) -> Result:
    """Of what was found, by tool and operator. The summary has every problem."""
    status = worst_of(one["status"] for one in found.values())
    tools: dict[str, dict[str, Any]] = {}
    for (tool, op), one in found.items():
        tools.setdefault(tool, {})[op] = one
    problems = {tool: [one["problem"] for one in ops.values() if one["problem"]] for tool, ops in tools.items()}
    summary = "; ".join(f"{tool}: {'; '.join(texts) or 'nothing found'}" for tool, texts in problems.items())
    return Result(status, summary, {"tools": tools})


def last_line(text: str) -> str:
    return "".join(text.strip().splitlines()[-1:])


def profile(run: Run) -> Result:
    """One call of every operator: its first timed case."""
    calls, first = run.work / "timed.calls", {op: check.timed[0] for op, check in run.contracts.items()}
    cases = {op: timed.small if run.device.emulated else timed.case for op, timed in first.items()}
    # inputs are made where that is quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_calls(calls, ((op, check, cases[op]) for op, check in run.contracts.items()), device)
    have_ncu = not run.device.emulated and shutil.which("ncu") is not None
    command = [*NCU * have_ncu, str(driver_path(run)), str(library_path(run)), str(calls)]
    program = Path(command[0]).name
    try:
        done = run_program(command, run.seconds_left)
    except subprocess.TimeoutExpired as error:
        ran = str(error.stdout).count("call: ")
        details = {"kernels": kernels_from_csv(str(error.stdout)), "log": str(error.stdout)[-LOG_CHARACTERS:]}
        return Result(NOT_RUN, f"{program} had no time left in call {ran} of {len(cases)}", details)
    printed = done.stdout + done.stderr
    log = {"log": printed[-LOG_CHARACTERS:]}
    if refused := [text for text in REFUSALS if have_ncu and text in printed]:
        return Result(NOT_RUN, f"ncu cannot read this GPU's counters: {refused[0]}", log)
    if done.returncode != 0:
        return Result(FAILED, f"{program} ended with {done.returncode}: {last_line(printed)}", log)
    if run.device.emulated:
        return Result(PASSED, f"{len(cases)} calls ran, without ncu", {})
    if not have_ncu:
        return Result(NOT_RUN, f"ncu is missing; expected it on PATH. {len(cases)} calls ran without it", {})
    kernels = kernels_from_csv(done.stdout)
    if not kernels:
        return Result(FAILED, "ncu printed no table", log)
    return Result(PASSED, f"{len(kernels)} launches", {"kernels": kernels})


def kernels_from_csv(output: str) -> list[dict[str, Any]]:
    """Every launch with its metrics, "value unit" by "section: name", and the findings of ncu's rules."""
    begin = output.find('"ID"')
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO(output[begin:])) if begin >= 0 else ():
        if not (row.get("ID") or "").isdecimal():
            continue
        launch = launches.setdefault(
            row["ID"],
            {"kernel": row["Kernel Name"], "grid": row.get("Grid Size"), "block": row.get("Block Size")}
            | {"metrics": {}, "rules": []},
        )
        if row.get("Metric Name"):
            value = f"{row['Metric Value']} {row['Metric Unit']}".strip()
            launch["metrics"][f"{row['Section Name']}: {row['Metric Name']}"] = value
        if row.get("Rule Description"):
            launch["rules"].append(f"{row.get('Rule Name')}: {row['Rule Description']}")
    return list(launches.values())
