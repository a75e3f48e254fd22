"""How errors are measured: relative to the RMS of what is expected, so that one limit serves every scale.

`relative_error` and `rms` judge the outputs of a model; `value_error` and `magnitude` the values inside its graph,
whatever their axes mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.cases import Case

# Elements that a comparison works on at once: its float64 temporaries are a few times 8 bytes each.
SLICE_ELEMENTS = 2**20
# Logits of hidden keys are −1e9 or −3e38. They must agree too, but do not count for the scale of the others.
MASK_CONSTANT = 1e8


def rms(x: Array) -> float:
    """Root mean square, in float64."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def relative_error(actual: Array, expected: Array) -> tuple[float, tuple[int, int]]:
    """max |actual − expected| / scale over [tokens, channels], and its place; NaN counts as the largest.

    The scale of a token is the RMS of its sample, or its own RMS if that is larger: the first tokens of a causal model,
    which average over few keys, are ten times larger than the rest, and so is their rounding.
    """
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf − inf is NaN, which is what it should be
        error = np.abs(actual - expected) / scale_of(expected)
    token, channel = np.unravel_index(int(np.argmax(error)), error.shape)
    return float(error[token, channel]), (int(token), int(channel))


def scale_of(expected: Array) -> Array:
    """The scale of each token, to which its errors are relative, [tokens, 1]."""
    own = np.sqrt(np.mean(np.square(expected), axis=-1, keepdims=True))
    scale: Array = np.maximum(np.maximum(own, rms(expected)), np.finfo(np.float32).tiny)
    return scale


def largest_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """The largest change of any element that is compared, relative to the scale of its token."""
    changes = [
        relative_error(case.kept(outputs[name], row), case.kept(expected, row))[0]
        for name, expected in case.outputs.items()
        for row in range(len(expected))
    ]
    return float(np.max(changes))


def rms_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """RMS(outputs − reference) / RMS(reference) of what is compared, for the output that changes most."""
    changes = []
    for name, expected in case.outputs.items():
        actual, wanted = (
            np.concatenate([case.kept(array, sample) for sample in range(len(array))])
            for array in (outputs[name].astype(np.float32), expected)
        )
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
    step = max(1, SLICE_ELEMENTS // width)
    slices = [slice(start, start + step) for start in range(0, len(expected), step)]
    sums = np.sum([square_sums(expected[rows]).sum(axis=1) for rows in slices], axis=0)
    whole = mean_root(*sums)
    errors = [slice_error(actual[rows], expected[rows], whole) for rows in slices]
    return float(np.max(errors))  # not the built-in max, which may drop NaN


def magnitude(x: Array) -> tuple[float, float]:
    """The largest absolute value and the RMS of all elements except mask constants; zeros if there are no others."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    step = max(1, SLICE_ELEMENTS // max(1, rows.shape[1]))
    largest, sums = 0.0, np.zeros(2)
    for start in range(0, len(rows), step):
        part = np.abs(rows[start : start + step].astype(np.float64))
        largest = max(largest, float(np.max(part, where=part < MASK_CONSTANT, initial=0.0)))
        sums += square_sums(part).sum(axis=1)
    return largest, float(mean_root(*sums))


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
    own = mean_root(*square_sums(expected))[:, None]
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    scale = np.maximum(np.maximum(own, whole), np.finfo(np.float32).tiny)
    scale = np.where(np.abs(expected) < MASK_CONSTANT, scale, np.abs(expected))
    with np.errstate(invalid="ignore"):  # inf − inf, where both are equal
        error = np.abs(actual - expected) / scale
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return float(np.where(same, 0.0, error).max())
