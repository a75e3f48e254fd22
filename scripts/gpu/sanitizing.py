"""The sanitizing stage: compute-sanitizer over a small program that calls every kernel with small sizes.

memcheck finds accesses outside of arrays, racecheck two threads at the same shared memory without a barrier between
them, initcheck reads of memory that nothing has written. In the rehearsal the same program and calls run under
AddressSanitizer, which finds the first kind alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from effexport.plugins.gpu_check import load_gpu_check
from effexport.plugins.ops import OPS
from gpu.building import SANITIZER, driver_path, emulating_toolchain, library_path, make_driver, make_library
from gpu.calls import write_calls
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run

TOOLS = ("memcheck", "racecheck", "initcheck")
ERROR_EXIT = 9
LOG_CHARACTERS = 20_000


def sanitize(run: Run) -> Result:
    if not run.device.emulated and not shutil.which("compute-sanitizer"):
        return Result(NOT_RUN, "compute-sanitizer is missing; expected it on PATH, as the CUDA toolkit installs it", {})
    calls = run.work / "small.calls"
    checks = [(op.torch_name, load_gpu_check(op)) for op in OPS.values() if op.torch_name in run.ops]
    write_calls(calls, ((name, check, case) for name, check in checks for case in check.small))
    if run.device.emulated:
        return emulated_result(run, calls)
    driver = [str(driver_path(run)), str(library_path(run)), str(calls)]
    seconds = run.begin_before - time.time()
    with ThreadPoolExecutor(len(TOOLS)) as pool:  # each of them leaves most of the GPU idle
        found = dict(zip(TOOLS, pool.map(lambda tool: run_tool(tool, driver, seconds), TOOLS), strict=True))
    return result_of(found)


def run_tool(tool: str, program: Sequence[str], seconds: float) -> dict[str, Any]:
    """One tool over a program, as JSON. problem: what it found, or an empty text."""
    options = ["--tool", tool, "--error-exitcode", str(ERROR_EXIT)]
    options += {"racecheck": ["--racecheck-report", "all"], "memcheck": ["--leak-check", "full"]}.get(tool, [])
    return checked(["compute-sanitizer", *options, *program], seconds)


def checked(command: Sequence[str], seconds: float, **environment: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        return {"problem": f"not finished after {seconds:.0f} s", "status": NOT_RUN, "log": output[-LOG_CHARACTERS:]}
    log = (done.stdout + done.stderr)[-LOG_CHARACTERS:]
    ran = re.search(r"^\d+ calls$", done.stdout, re.MULTILINE)
    summary = re.findall(r"ERROR SUMMARY: (.*)|(\d+ hazards? displayed.*)", log)
    # what the tools say last, or the program
    last = [line.strip("= ") for line in log.splitlines() if "SUMMARY" in line] or log.strip().splitlines()[-1:]
    problem = "" if done.returncode == 0 and ran else f"exit status {done.returncode}: {''.join(last[-1:])}"
    return {
        "problem": problem,
        "status": FAILED if problem else PASSED,
        "summary": ["".join(parts) for parts in summary],
        "log": log if problem else "",
    }


def emulated_result(run: Run, calls: Path) -> Result:
    """The calls under the compiler's AddressSanitizer."""
    folder = run.work / "sanitized"
    folder.mkdir(exist_ok=True)
    make_library(run, emulating_toolchain(*SANITIZER), folder / "kernels.so")
    make_driver(folder / "driver", *SANITIZER)
    program = [str(folder / "driver"), str(folder / "kernels.so"), str(calls)]
    # arrays that are freed after a failure only are not leaks
    found = {"AddressSanitizer": checked(program, run.begin_before - time.time(), ASAN_OPTIONS="detect_leaks=0")}
    return result_of(found)


def result_of(found: dict[str, dict[str, Any]]) -> Result:
    statuses = [one["status"] for one in found.values()]
    status = next(status for status in (FAILED, NOT_RUN, PASSED) if status in statuses)
    summary = "; ".join(f"{tool}: {one['problem'] or 'nothing found'}" for tool, one in found.items())
    return Result(status, summary, {"tools": found})
