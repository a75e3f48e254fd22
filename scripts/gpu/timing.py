"""The timing stage: what this GPU can do at best, then every operator's kernels and their baselines in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effexport.plugins.contract import AtMost, Case, Contract, FasterThan, Timed, Work
from gpu.bounds import Rates, bound_of
from gpu.building import load_kernels
from gpu.device import Device, Kernels
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run
from gpu.stopwatch import copies_of, forbid_tf32, nbytes, number_of_copies, readings

KERNEL = "kernel"
HALF_TYPES = ("float16", "bfloat16")
COPY_BYTES, MATRIX_SIDE, CLOCKS = 1 << 30, 8192, 10**7
REHEARSED_COPY_BYTES, REHEARSED_MATRIX_SIDE = 1 << 20, 64


def time_operators(run: Run) -> Result:
    kernels = load_kernels(run)
    forbid_tf32()
    ceilings = measured_ceilings(run.device)
    cases = [
        ({"op": name, "case": timed.case.name}, partial(time_case, kernels, name, check, timed, ceilings))
        for name, check in run.contracts.items()
        for timed in check.timed
    ]
    found = run.found_in_time("timing", "timings", cases, ceilings=ceilings)
    return result_of(found, {"ceilings": ceilings, "timings": found})


def result_of(found: list[dict[str, Any]], details: dict[str, Any]) -> Result:
    """Passed if everything could run; how fast it was is for the table of goals."""
    not_run = [one for one in found if one.get("problem")]
    failed = [
        f"{one.get('op', '')} {one['case']}, {name}: {reading['problem']}".strip()
        for one in found
        for name, reading in one.get("readings", {}).items()
        if reading["problem"]
    ]
    status = FAILED if failed else NOT_RUN if not_run else PASSED
    ran = f"{len(found) - len(not_run)} of {len(found)} cases"
    return Result(status, "; ".join([ran, *failed[:1]]), details)


def measured_ceilings(device: Device) -> dict[str, float | None]:
    """At best: bytes per second of a copy, read and written, or of a sum, whichever are more; operations per second of
    matrix products in half types; and clocks per second, of a kernel that counts them.

    Of random numbers, because zeros are faster. Clocks alone and first, because products may lower them. None in an
    emulation.
    """
    clock = readings(device, {"clock": [partial(count_clocks, device)]})
    size = REHEARSED_COPY_BYTES if device.emulated else COPY_BYTES
    side = REHEARSED_MATRIX_SIDE if device.emulated else MATRIX_SIDE
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    calls: dict[str, list[Callable[[], object]]] = {
        "copy": [partial(target.copy_, source)],
        "sum": [partial(torch.sum, source.view(torch.int64))],
    }
    for name in HALF_TYPES:
        left, right = (torch.randn(side, side, device=device.name).to(getattr(torch, name)) for _ in range(2))
        calls[name] = [partial(torch.matmul, left, right)]
    work = {"copy": 2.0 * size, "sum": size, **dict.fromkeys(HALF_TYPES, 2.0 * side**3), "clock": float(CLOCKS)}
    found = {**readings(device, calls), **clock}
    if problems := [f"{name}: {one['problem']}" for name, one in found.items() if one["problem"]]:
        raise RuntimeError("; ".join(problems))
    rates = {name: one["best_us"] and work[name] / (one["best_us"] * 1e-6) for name, one in found.items()}
    read = rates.pop("sum")
    return rates if read is None else {**rates, "copy": max(rates["copy"], read)}


def count_clocks(device: Device) -> None:
    """Keep one thread of the GPU busy for CLOCKS clocks. PyTorch has the kernel for tests of its own."""
    if not device.emulated:
        torch.cuda._sleep(CLOCKS)


def rates_of(ceilings: dict[str, float | None], dtype: str) -> Rates | None:
    """The best rates of this GPU, for bounds of a case. None in an emulation."""
    copied, clock_hz = ceilings["copy"], ceilings["clock"]
    products = ceilings[dtype if dtype in HALF_TYPES else HALF_TYPES[0]]
    if copied is None or clock_hz is None or products is None:
        return None
    gpu = torch.cuda.get_device_properties(0)
    return Rates.of(copied, products / 2, gpu.multi_processor_count, clock_hz, gpu.L2_cache_size)


def time_case(
    kernels: Kernels, name: str, check: Contract, timed: Timed, ceilings: dict[str, float | None]
) -> dict[str, Any]:
    """One case as JSON: the readings of the kernel and all baselines, the lower bound of the time, and the goals."""
    case = timed.small if kernels.device.emulated else timed.case
    inputs = check.inputs(case, kernels.device.name)
    moved = nbytes(inputs) + nbytes(outputs_of(check, case, kernels.device))
    copies = copies_of(inputs, number_of_copies(kernels.device, moved))
    calls: dict[str, list[Callable[[], object]]] = {
        KERNEL: [kernel_call(kernels, name, check, case, x) for x in copies]
    }
    for copy in copies:
        for baseline, call in check.baselines(case, copy).items():
            calls.setdefault(baseline, []).append(call)
    return {
        "op": name,
        "case": timed.case.name,
        "copies": len(copies),
        "readings": readings(kernels.device, calls),
        **lower_bound(check.work(case), moved, case.dtype, ceilings),
        "goals": [goal_json(goal) for goal in timed.goals],
    }


def outputs_of(check: Contract, case: Case, device: Device) -> dict[str, Tensor]:
    shapes = check.outputs(case).items()
    return {name: torch.empty(output.shape, dtype=output.dtype, device=device.name) for name, output in shapes}


def kernel_call(
    kernels: Kernels, name: str, check: Contract, case: Case, inputs: dict[str, Tensor]
) -> Callable[[], object]:
    """A call with outputs and scratch memory of its own."""
    arrays = [*inputs.values(), *outputs_of(check, case, kernels.device).values()]
    scratch = torch.empty(kernels.scratch_bytes(name, case), dtype=torch.uint8, device=kernels.device.name)
    return lambda: kernels.launch(name, case, arrays, scratch)


def lower_bound(work: Work, moved: int, dtype: str, ceilings: dict[str, float | None]) -> dict[str, Any]:
    """A lower bound on the time of this work, and the resource behind it. moved: bytes of all inputs and outputs."""
    rates = rates_of(ceilings, dtype)
    if rates is None:
        return {"bound_us": None, "bound_by": "not measured"}
    bound = bound_of(work, moved, rates)
    return {"bound_us": bound.us, "bound_by": bound.resource}


def goal_json(goal: AtMost | FasterThan) -> dict[str, Any]:
    if isinstance(goal, AtMost):
        return {"at_most": goal.times, "reason": goal.reason}
    return {"baseline": goal.baseline, "times": goal.times, "reason": goal.reason}
