"""The correctness stage: every operator's kernels against its reference in float64.

Outputs and scratch memory are filled with NaN, or −1, before a call, and so are guards around them. Every call is made
twice and must give the same bits; in the emulation the second one runs threads in another order. The second call of a
small case has few blocks, which take several items each.

References are computed for some samples at a time, and compared with the outputs at once. So a reference may take all
samples that it is given in one product, and a huge case fits into the GPU's memory.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effexport.plugins.contract import Case, Contract, Output
from gpu.building import load_kernels
from gpu.device import ALL_BLOCKS, FEW_BLOCKS, KernelError, Kernels
from gpu.stages import FAILED, LATE, NOT_RUN, PASSED, Result, Run

# What the reference of some samples may take, of a GPU with 80 GB that four processes share.
PART_BYTES = 8 << 30
# Arrays in float64 that a reference has at the same time, in sizes of its inputs, outputs and largest intermediate one.
ARRAYS_AT_ONCE = 2
# Elements of an array of which all bytes can be counted with 32 bits, as PyTorch's own kernels do it most often.
PIECE = 1 << 28
# Numbers of elements at which an index or an offset in bytes may overflow.
OVERFLOWS = (2**30, 2**31, 2**32)


def relative_error(check: Contract, case: Case, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> Tensor:
    """The largest difference of an output, over the largest value of its reference, or over 1 if that is zero.

    Of integers, the share that differs. NaN if any output has an infinite value, NaN, or a negative integer, which no
    operator returns, also in samples that are not compared.
    """
    expected: dict[str, list[Tensor]] = {name: [] for name in outputs}
    found: dict[str, list[Tensor]] = {name: [] for name in outputs}
    for part in parts(check, case, {**inputs, **outputs}):
        own = {name: x if name in check.shared else rows_of(x, case, part) for name, x in inputs.items()}
        references = check.exact(replace(case, sizes=(len(part), *case.sizes[1:])), own)
        assert outputs.keys() == references.keys(), f"outputs {[*outputs]} and references {[*references]} differ"
        for name, reference in references.items():
            difference, largest = differences(rows_of(outputs[name], case, part), reference)
            found[name].append(difference)
            expected[name].append(largest)
    errors = []
    for name, output in outputs.items():
        if output.is_floating_point():
            worst, largest = torch.stack(found[name]).amax(), torch.stack(expected[name]).amax()
            error = worst / torch.where(largest > 0, largest, 1)
        else:
            error = torch.stack(found[name]).sum() / torch.stack(expected[name]).sum()
        errors.append(torch.where(is_written(output), error, torch.nan))
    return torch.stack(errors).amax()  # not the built-in max, which may drop NaN


def differences(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """The largest difference and the largest value; of integers, how many differ, of how many."""
    if actual.shape != expected.shape:
        raise ValueError(f"an output has shape {tuple(actual.shape)}, its reference {tuple(expected.shape)}")
    if not actual.is_floating_point():
        return (actual != expected).sum(dtype=torch.float64), expected.new_tensor(expected.numel(), dtype=torch.float64)
    return (actual.double() - expected).abs().amax(), expected.abs().amax()


def is_written(output: Tensor) -> Tensor:
    """True if every element was overwritten by the call and is finite."""
    extremes = torch.stack([value for piece in pieces(output) for value in piece.aminmax()])  # NaN stays
    return (extremes.isfinite() if output.is_floating_point() else extremes >= 0).all()


def pieces(array: Tensor) -> tuple[Tensor, ...]:
    """The elements of a huge array, some at a time."""
    return array.reshape(-1).split(PIECE)


def rows_of(array: Tensor, case: Case, samples: Sequence[int]) -> Tensor:
    """The rows of some samples."""
    rows = array.shape[0] // case.sizes[0]
    if isinstance(samples, range):
        return array[samples.start * rows : samples.stop * rows]
    return torch.cat([array[sample * rows : (sample + 1) * rows] for sample in samples])


def parts(check: Contract, case: Case, arrays: dict[str, Tensor]) -> list[Sequence[int]]:
    """The samples that are compared, in parts whose reference fits into PART_BYTES if one sample's does."""
    samples = case.sizes[0]
    sizes = [array.numel() // samples for name, array in arrays.items() if name not in check.shared]
    at_once = max(1, PART_BYTES // (8 * ARRAYS_AT_ONCE * (sum(sizes) + check.intermediate(case))))
    all_of_them: Sequence[int] = range(samples)
    if check.compared is not None and case in check.huge:
        all_of_them = chosen_samples(samples, check.compared, sizes)
    return [all_of_them[first : first + at_once] for first in range(0, len(all_of_them), at_once)]


def chosen_samples(samples: int, count: int, sizes: Sequence[int]) -> list[int]:
    """`count` samples or a few more: the first, the last, those around overflows of arrays with so many elements for
    each sample, and others at equal distances."""
    around = {number // size + near for number in OVERFLOWS for size in sizes if size for near in (-1, 0, 1)}
    chosen = {0, samples - 1} | {sample for sample in around if 0 <= sample < samples}
    rest = max(count - len(chosen), 0)
    return sorted(chosen | {samples * (index + 1) // (rest + 1) for index in range(rest)})


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
