"""Measures of errors: relative to the RMS of the expected numbers, so that one limit serves every scale.

`relative_error` and `rms` judge the outputs of a model; `value_error` and `magnitude` the values inside its graph,
whatever their axes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import Array

if TYPE_CHECKING:
    from effexport.proof.cases import Case

# Elements that a comparison works on at once, so that its float64 temporaries stay in the cache of a core.
SLICE_ELEMENTS = 2**16
# Logits of hidden keys are −1e9 or −3e38. They must agree too, but do not count for the scale of the others.
MASK_CONSTANT = 1e8


def rms(x: Array) -> float:
    """Root mean square, in float64."""
    flat = x.reshape(-1)
    total = sum(float(np.sum(np.square(flat[part], dtype=np.float64))) for part in slices(len(flat), 1))
    return float(np.sqrt(total / max(1, len(flat))))


def slices(rows: int, width: int) -> Iterator[slice]:
    """Parts of rows of this width, each small enough for a cache; a row is never cut."""
    step = max(1, SLICE_ELEMENTS // max(1, width))
    yield from (slice(start, start + step) for start in range(0, rows, step))


def relative_error(actual: Array, expected: Array) -> tuple[float, tuple[int, int]]:
    """max |actual − expected| / scale over [tokens, channels], and its place; NaN counts as the largest.

    The scale of a token is the RMS of its sample, or its own RMS if that is larger: the first tokens of a causal model,
    which average over few keys, are ten times larger than the rest, and so is their rounding.
    """
    return largest(relative for _, _, relative in relative_errors(actual, expected))


def largest_error(actual: Array, expected: Array) -> float:
    """The first of `relative_error`."""
    return relative_error(actual, expected)[0]


def relative_errors(actual: Array, expected: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Some rows of both in float64, and |actual − expected| / scale of them, part after part; see `relative_error`."""
    if not expected.size:
        return
    actual, expected = comparable(actual, expected)
    ordinary = is_ordinary(expected)
    whole = rms(expected) if ordinary else mean_root(*square_sums(expected).sum(axis=1))
    for rows in slices(*expected.shape):
        ours, wanted = actual[rows].astype(np.float64), expected[rows].astype(np.float64)
        if ordinary:
            own = np.sqrt(np.mean(np.square(wanted), axis=-1, keepdims=True))
            scale = np.maximum(np.maximum(own, whole), np.finfo(np.float32).tiny)
        else:
            scale = scales(wanted, whole)
        with np.errstate(invalid="ignore"):  # inf − inf is NaN, which is what it should be
            relative = np.abs(ours - wanted) / scale
        yield ours, wanted, relative


def comparable(actual: Array, expected: Array) -> tuple[Array, Array]:
    """Both with zeros where there is no number to compare, because both are infinite alike."""
    if is_ordinary(expected):
        return actual, expected
    alike = np.isinf(expected) & (actual == expected)
    return np.where(alike, 0, actual), np.where(alike, 0, expected)


def is_ordinary(x: Array) -> bool:
    """True if all elements are finite, and none is a mask constant."""
    return float(np.abs(x).max(initial=0)) < MASK_CONSTANT  # not if it is NaN


def scales(expected: Array, whole: float) -> Array:
    """The scale of the errors of each element, float64 [rows, channels]: the RMS of its row, or `whole` if that is
    larger; of a mask constant, its own size, which then does not count for the others."""
    own = mean_root(*square_sums(expected))[:, None]
    scale = np.maximum(np.maximum(own, whole), np.finfo(np.float32).tiny)
    return np.where(np.abs(expected) < MASK_CONSTANT, scale, np.abs(expected))


def largest(parts: Iterable[Array]) -> tuple[float, tuple[int, int]]:
    """The largest element of rows that come in parts, and its place; NaN counts as the largest. 0 without elements."""
    value, place, first = -1.0, (0, 0), 0
    for part in parts:
        row, column = np.unravel_index(int(np.argmax(part)), part.shape)
        # NaN wins over every number, and stays
        if value == value and not part[row, column] <= value:
            value, place = float(part[row, column]), (first + int(row), int(column))
        first += len(part)
    return max(value, 0.0), place  # NaN stays


def overall_error(actual: Array, expected: Array) -> float:
    """RMS(actual − expected) / RMS(expected); NaN if there is one."""
    actual, expected = comparable(actual, expected)
    return rms(actual.astype(np.float32) - expected) / max(rms(expected), float(np.finfo(np.float32).tiny))


def largest_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """The largest change of any element that is compared, relative to the scale of its token."""
    changes = [
        largest_error(case.kept(name, outputs[name], row), case.kept(name, expected, row))
        for name, expected in case.outputs.items()
        for row in case.samples(expected)
    ]
    return float(np.max(changes))


def rms_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """RMS(outputs − reference) / RMS(reference) of what is compared, for the output that changes most."""
    changes = []
    for name, expected in case.outputs.items():
        actual, wanted = (
            np.concatenate([case.kept(name, array, sample) for sample in case.samples(array)])
            for array in (outputs[name].astype(np.float32), expected)
        )
        actual, wanted = comparable(actual, wanted)
        # a reference of zeros, as a layer without biases makes of zero tokens, must be met exactly
        changes.append(rms(actual - wanted) / max(rms(wanted), float(np.finfo(np.float32).tiny)))
    return float(np.max(changes))  # not the built-in max, which may drop NaN


def value_error(actual: Array, expected: Array) -> float:
    """max |actual − expected| / RMS, as in `relative_error`: a row of the last axis that is larger than the
    RMS of the whole has a scale of its own. For integers and booleans, the share that differs."""
    if actual.shape != expected.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind in "biu":
        return float(np.mean(actual != expected))
    width = expected.shape[-1] if expected.ndim else 1
    actual, expected = actual.reshape(-1, width), expected.reshape(-1, width)
    parts = [*slices(len(expected), width)]
    sums = np.sum([square_sums(expected[rows]).sum(axis=1) for rows in parts], axis=0)
    whole = mean_root(*sums)
    errors = [slice_error(actual[rows], expected[rows], whole) for rows in parts]
    return float(np.max(errors))  # not the built-in max, which may drop NaN


def magnitude(x: Array) -> tuple[float, float]:
    """The largest absolute value and the RMS of all elements except mask constants; zeros if there are no others."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    highest, sums = 0.0, np.zeros(2)
    for part_rows in slices(*rows.shape):
        part = np.abs(rows[part_rows].astype(np.float64))
        highest = max(highest, float(np.max(part, where=part < MASK_CONSTANT, initial=0.0)))
        sums += square_sums(part).sum(axis=1)
    return highest, float(mean_root(*sums))


def square_sums(x: Array) -> Array:
    """The sum of the squares and the number of all elements except mask constants, per row, float64 [2, rows]."""
    x = x.astype(np.float64)
    ordinary = np.abs(x) < MASK_CONSTANT  # NaN is not ordinary
    squares = np.square(x, where=ordinary, out=np.zeros(x.shape))
    return np.stack([squares.sum(axis=1), ordinary.sum(axis=1)])


def mean_root(total: Any, count: Any) -> Any:
    return np.sqrt(total / np.maximum(count, 1))


def slice_error(actual: Array, expected: Array, whole: float) -> float:
    """max |error| / scale of some rows; `whole` is the RMS of all."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    scale = scales(expected, whole)
    with np.errstate(invalid="ignore"):  # inf − inf, where both are equal
        error = np.abs(actual - expected) / scale
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return float(np.where(same, 0.0, error).max(initial=0.0))
