"""The profiling stage: ncu over one launch of each kernel at the sizes that are timed.

Writes what ncu measured, and what its rules say about it, for every kernel. In the rehearsal the same program runs
smaller calls by itself.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS
from gpu.building import driver_path, library_path
from gpu.calls import write_calls
from gpu.programs import run_program
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run

# --clock-control none: ncu must not change the clocks of a card that is shared
NCU = ("ncu", "--clock-control", "none", "--set", "detailed", "--csv", "--page", "details")
# what it says without permission, or where the machine's virtualisation keeps it from the GPU
REFUSALS = ("ERR_NVGPUCTRPERM", "Failed to initialize the profiler")
LOG_CHARACTERS = 20_000


def profile(run: Run) -> Result:
    """One call of every operator: its first timed case."""
    calls = run.work / "timed.calls"
    checks = [(op.torch_name, load_contract(op)) for op in CUDA_OPS.values() if op.torch_name in run.ops]
    first = [(name, check, check.timed[0]) for name, check in checks]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(name, check, one.small if run.device.emulated else one.case) for name, check, one in first]
    write_calls(calls, cases, device)
    program = [str(driver_path(run)), str(library_path(run)), str(calls)]
    have_ncu = not run.device.emulated and shutil.which("ncu") is not None
    command = [*NCU, *program] if have_ncu else program
    try:
        done = run_program(command, run.seconds_left)
    except subprocess.TimeoutExpired as error:
        ran = str(error.stdout).count("call: ")
        details = {"kernels": kernels_from_csv(str(error.stdout)), "log": str(error.stdout)[-LOG_CHARACTERS:]}
        return Result(NOT_RUN, f"{Path(command[0]).name} had no time left in call {ran} of {len(first)}", details)
    printed = done.stdout + done.stderr
    if refused := [text for text in REFUSALS if have_ncu and text in printed]:
        details = {"log": printed[-LOG_CHARACTERS:]}
        return Result(NOT_RUN, f"ncu cannot read this GPU's counters: {refused[0]}", details)
    if done.returncode != 0:
        last = printed.strip().splitlines()[-1:]
        details = {"log": printed[-LOG_CHARACTERS:]}
        return Result(FAILED, f"{Path(command[0]).name} ended with {done.returncode}: {''.join(last)}", details)
    if run.device.emulated:
        return Result(PASSED, f"{len(first)} calls ran, without ncu", {})
    if not have_ncu:
        return Result(NOT_RUN, f"ncu is missing; expected it on PATH. {len(first)} calls ran without it", {})
    kernels = kernels_from_csv(done.stdout)
    if not kernels:
        return Result(FAILED, "ncu printed no table", {"log": done.stdout[-LOG_CHARACTERS:]})
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
