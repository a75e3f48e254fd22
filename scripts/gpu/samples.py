"""References of large cases: computed for some samples at a time, and compared with the outputs at once.

So a reference may take all samples that it is given in one product, and a huge case fits into the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from effexport.plugins.contract import Case, Contract

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
