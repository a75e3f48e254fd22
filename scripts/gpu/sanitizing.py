"""The sanitizing stage: compute-sanitizer over a small program that calls every kernel with small sizes.

memcheck finds accesses outside of arrays, racecheck two threads at the same shared memory without a barrier between
them, initcheck reads of memory that nothing has written. In the rehearsal the same program and calls run under
AddressSanitizer, which finds the first kind alone; tests/plugins/test_cuda_races.py finds the second without a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from effexport.base.environment import usable_cores
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS
from gpu.building import SANITIZER, driver_path, emulating_toolchain, library_path, make_driver, make_library
from gpu.calls import write_calls
from gpu.device import FEW_BLOCKS
from gpu.programs import run_program
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run

# by name, with their options
TOOLS = {"memcheck": ("--leak-check", "full"), "racecheck": ("--racecheck-report", "all"), "initcheck": ()}
EMULATED_TOOL = "AddressSanitizer"
ERROR_EXIT = 9
# what compute-sanitizer says where the machine's virtualisation keeps it from the GPU
UNSUPPORTED = "Device not supported"
LOG_CHARACTERS = 20_000


def sanitize(run: Run) -> Result:
    """Every tool over every operator, in processes of their own: a fault may end its process.

    With few blocks, because racecheck sees nothing between two items of a block that takes one.
    """
    if not run.device.emulated and not shutil.which("compute-sanitizer"):
        return Result(NOT_RUN, "compute-sanitizer is missing; expected it on PATH, as the CUDA toolkit installs it", {})
    programs = {}
    for op in CUDA_OPS.values():
        if op.torch_name in run.ops:
            check, calls = load_contract(op), run.work / f"{op.torch_name}.calls"
            write_calls(calls, ((op.torch_name, check, case) for case in check.small))
            programs[op.torch_name] = [str(driver_path(run)), str(library_path(run)), str(calls), str(FEW_BLOCKS)]
    commands = emulated_commands(run, programs) if run.device.emulated else sanitizer_commands(programs)
    # each of the processes leaves most of a GPU idle
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = pool.map(lambda command: checked(command, run.seconds_left), commands.values())
        return result_of(dict(zip(commands, found, strict=True)))


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
    last = [line.strip("= ") for line in log.splitlines() if "SUMMARY" in line] or log.strip().splitlines()[-1:]
    clean = done.returncode == 0 and ran
    problem = "" if clean else f"{place(done.stdout)}exit status {done.returncode}: {''.join(last[-1:])}"
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


def result_of(found: dict[tuple[str, str], dict[str, Any]]) -> Result:
    """Of what was found, by tool and operator. The summary has every problem."""
    statuses = [one["status"] for one in found.values()]
    status = next(status for status in (FAILED, NOT_RUN, PASSED) if status in statuses)
    tools: dict[str, dict[str, Any]] = {}
    for (tool, op), one in found.items():
        tools.setdefault(tool, {})[op] = one
    problems = {tool: [one["problem"] for one in ops.values() if one["problem"]] for tool, ops in tools.items()}
    summary = "; ".join(f"{tool}: {'; '.join(texts) or 'nothing found'}" for tool, texts in problems.items())
    return Result(status, summary, {"tools": tools})
