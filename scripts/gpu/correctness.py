"""The correctness stage: every operator's kernels against its reference in float64.

Outputs and scratch memory are filled with NaN, or −1, before a call, and so are guards around them. Every call is made
twice and must give the same bits; in the emulation the second one runs threads in another order. The second call of a
small case has few blocks, which take several items each.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effexport.plugins.contract import Case, Contract, Output
from gpu.building import load_kernels
from gpu.device import ALL_BLOCKS, FEW_BLOCKS, KernelError, Kernels
from gpu.samples import pieces, relative_error
from gpu.stages import FAILED, LATE, NOT_RUN, PASSED, Result, Run

# Arrays stay aligned as cudaMalloc aligns them.
GUARD_BYTES = 256
POISON = 0xFF


class Guarded:
    """Poisoned memory between guards, and a tensor in it."""

    def __init__(self, output: Output, device: str) -> None:
        size = math.prod(output.shape) * output.dtype.itemsize
        self.whole = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
        self.tensor = self.whole[GUARD_BYTES : GUARD_BYTES + size].view(output.dtype).view(output.shape)

    def is_intact(self) -> bool:
        edges = torch.cat([self.whole[:GUARD_BYTES], self.whole[-GUARD_BYTES:]])
        return bool((edges == POISON).all())


def check(run: Run) -> Result:
    kernels = load_kernels(run)

    def checked(name: str, check: Contract, case: Case) -> dict[str, Any]:
        # arrays of two huge cases, with their references, may be too much for the GPU's memory
        with one_at_a_time(run.work / "huge") if case in check.huge else nullcontext():
            result = check_case(kernels, name, check, case)
            kernels.device.free_memory()
        return result

    cases = [
        ({"op": name, "case": case.name}, partial(checked, name, check, case))
        for name, check in run.contracts.items()
        for case in (check.small if run.device.emulated else (*check.small, *check.checked, *check.huge))
    ]
    return result_of(run.found_in_time("correctness", "cases", cases))


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with this file."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def result_of(found: list[dict[str, Any]]) -> Result:
    bad = [f"{one['case']}: {one['problem']}" for one in found if one["problem"]]
    late = [one for one in found if one["problem"] == LATE]
    status = FAILED if len(bad) > len(late) else NOT_RUN if late else PASSED
    summary = f"{len(found) - len(bad)} of {len(found)} cases" + (f"; {bad[0]}" if bad else "")
    return Result(status, summary, {"cases": found})


def check_case(kernels: Kernels, name: str, check: Contract, case: Case) -> dict[str, Any]:
    """One case as JSON. problem: what is wrong, or an empty text."""
    begin = time.monotonic()
    inputs = check.inputs(case, kernels.device.name)
    try:
        first, problem = call_guarded(kernels, name, check, case, inputs)
        schedule = (1, FEW_BLOCKS if case in check.small else ALL_BLOCKS)
        again, other_problem = call_guarded(kernels, name, check, case, inputs, schedule)
    except KernelError as error:
        return {"op": name, "case": case.name, "problem": str(error)}
    problem = problem or other_problem
    repeatable = all(same_bits(first[key], again[key]) for key in first)
    del again  # huge arrays leave little memory for others
    if not all(same_bits(value, inputs[key]) for key, value in check.inputs(case, kernels.device.name).items()):
        problem = problem or "the kernel changed its inputs"
    if not repeatable:
        problem = problem or "two calls gave different bits"
    limit = check.limit(case)
    difference = float(relative_error(check, case, inputs, first))
    if not difference <= limit.value:  # NaN does not pass
        problem = problem or f"error {difference:.3g}; expected at most {limit.value:.3g}"
    return {
        "op": name,
        "case": case.name,
        "error": difference,
        "limit": limit.value,
        "reason": limit.reason,
        "problem": problem,
        "seconds": round(time.monotonic() - begin, 2),
    }


def call_guarded(
    kernels: Kernels,
    name: str,
    check: Contract,
    case: Case,
    inputs: dict[str, Tensor],
    schedule: tuple[int, int] = (0, ALL_BLOCKS),
) -> tuple[dict[str, Tensor], str]:
    """The outputs of one call, and what was written outside of them."""
    device = kernels.device.name
    outputs = {key: Guarded(output, device) for key, output in check.outputs(case).items()}
    scratch = Guarded(Output((kernels.scratch_bytes(name, case),), torch.uint8), device)
    kernels.set_schedule(*schedule)
    kernels.launch(name, case, [*inputs.values(), *(output.tensor for output in outputs.values())], scratch.tensor)
    kernels.device.synchronize()
    broken = [key for key, guarded in {**outputs, "scratch": scratch}.items() if not guarded.is_intact()]
    problem = f"the kernel wrote beyond {', '.join(broken)}" if broken else ""
    return {key: output.tensor for key, output in outputs.items()}, problem


def same_bits(a: Tensor, b: Tensor) -> bool:
    one, other = (pieces(x.reshape(-1).view(torch.uint8)) for x in (a, b))
    return all(map(torch.equal, one, other))
