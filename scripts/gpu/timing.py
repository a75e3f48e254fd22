"""The timing stage: what this GPU can do at best, then every operator's kernels and their baselines in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effexport.plugins.gpu_check import AtMost, Case, FasterThan, GpuCheck, Timed, load_gpu_check
from effexport.plugins.ops import FLOAT_TYPES, OPS
from gpu.building import load_kernels
from gpu.device import Device, Kernels
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run
from gpu.stopwatch import copies_of, forbid_tf32, nbytes, number_of_copies, readings

KERNEL = "kernel"
COPY_BYTES, MATRIX_SIDE = 1 << 30, 8192
REHEARSED_COPY_BYTES, REHEARSED_MATRIX_SIDE = 1 << 20, 64


def time_operators(run: Run) -> Result:
    kernels = load_kernels(run)
    forbid_tf32()
    ceilings = measured_ceilings(run.device)
    found: list[dict[str, Any]] = []
    checks = [(op.torch_name, load_gpu_check(op)) for op in OPS.values() if op.torch_name in run.ops]
    cases = [(name, check, timed) for name, check in checks for timed in check.timed]
    for (name, check, timed), in_time in run.in_time(cases):
        if not in_time:
            found.append({"op": name, "case": timed.case.name, "problem": "no time was left"})
            continue
        found.append(time_case(kernels, name, check, timed, ceilings))
        run.keep("timing", {"ceilings": ceilings, "timings": found})
        run.device.free_memory()
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
    """Bytes per second of a copy, read and written, and operations per second of a matrix product in each type.

    Of random numbers, because zeros are faster. None in an emulation.
    """
    size = REHEARSED_COPY_BYTES if device.emulated else COPY_BYTES
    side = REHEARSED_MATRIX_SIDE if device.emulated else MATRIX_SIDE
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    calls: dict[str, list[Callable[[], object]]] = {"copy": [partial(target.copy_, source)]}
    for name in FLOAT_TYPES:
        left, right = (torch.randn(side, side, device=device.name).to(getattr(torch, name)) for _ in range(2))
        calls[name] = [partial(torch.matmul, left, right)]
    work = {"copy": 2.0 * size, **dict.fromkeys(FLOAT_TYPES, 2.0 * side**3)}
    found = readings(device, calls)
    if problems := [f"{name}: {one['problem']}" for name, one in found.items() if one["problem"]]:
        raise RuntimeError("; ".join(problems))
    return {name: one["us"] and work[name] / (one["us"] * 1e-6) for name, one in found.items()}


def time_case(
    kernels: Kernels, name: str, check: GpuCheck, timed: Timed, ceilings: dict[str, float | None]
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
        **lower_bound(ceilings, moved, check.flops(case), case.dtype),
        "goals": [goal_json(goal) for goal in timed.goals],
    }


def outputs_of(check: GpuCheck, case: Case, device: Device) -> dict[str, Tensor]:
    shapes = check.outputs(case).items()
    return {name: torch.empty(output.shape, dtype=output.dtype, device=device.name) for name, output in shapes}


def kernel_call(
    kernels: Kernels, name: str, check: GpuCheck, case: Case, inputs: dict[str, Tensor]
) -> Callable[[], object]:
    """A call with outputs and scratch memory of its own."""
    arrays = [*inputs.values(), *outputs_of(check, case, kernels.device).values()]
    scratch = torch.empty(kernels.scratch_bytes(name, case), dtype=torch.uint8, device=kernels.device.name)
    return lambda: kernels.launch(name, case, arrays, scratch)


def lower_bound(ceilings: dict[str, float | None], moved: int, flops: float, dtype: str) -> dict[str, Any]:
    """No kernel can be faster: the time to read all inputs and write all outputs once, or that of its arithmetic."""
    copy, products = ceilings["copy"], ceilings.get(dtype)
    if copy is None:
        return {"bound_us": None, "bound_by": "not measured"}
    memory, arithmetic = 1e6 * moved / copy, 1e6 * flops / products if products else 0.0
    return {"bound_us": max(memory, arithmetic), "bound_by": "memory" if memory >= arithmetic else "arithmetic"}


def goal_json(goal: AtMost | FasterThan) -> dict[str, Any]:
    if isinstance(goal, AtMost):
        return {"at_most_us": goal.us, "reason": goal.reason}
    return {"baseline": goal.baseline, "times": goal.times, "reason": goal.reason}
