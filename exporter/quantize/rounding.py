"""Numbers as their quantised codes and scales, in numpy: what the proof stores, prescribes and compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from effexport.base.dtypes import Array

# Numbers of a tensor in bfloat16 that lie as near to each other as this share of its RMS count as equal: the float32
# sums that they come from may be so far apart (tolerances.py), and the steps of bfloat16 near zero are far finer.
SUMS_APART = 2.0**-15
# The largest code: of int8, which is symmetric, and of float8 E4M3.
LARGEST_CODE = {"int8": 127, "fp8": 448}
# A token whose largest number is below this is rounded to multiples of the smallest normal number, so that no scale is
# zero or loses bits.
SMALLEST_MAXIMUM = float(127 * np.finfo(np.float32).tiny)


def rounded_rows(x: Array) -> tuple[Array, Array]:
    """The codes of float32 numbers, int8, and the scale of each row of the last axis, [..., 1]: the largest number of a
    row becomes 127."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(SMALLEST_MAXIMUM))
    codes = np.rint(x * (np.float32(127) / largest)).astype(np.int8)
    return codes, largest / np.float32(127)


def codes_of(x: Array, precision: str, scale: Array | float) -> Array:
    """The codes of float32 numbers: int8, or float8 E4M3 or bfloat16 as the bits of their numbers."""
    if precision == "bf16":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16).view(np.uint16)
    scaled = x / np.asarray(scale, dtype=np.float32)
    if precision == "int8":
        codes: Array = np.clip(np.rint(scaled), -128, 127).astype(np.int8)
        return codes
    import ml_dtypes

    clipped = np.clip(scaled, -LARGEST_CODE["fp8"], LARGEST_CODE["fp8"])
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def precision_of(codes: Array) -> str:
    """The precision that codes belong to, by their element type."""
    return {"int8": "int8", "uint8": "fp8", "uint16": "bf16"}[codes.dtype.name]


def numbers_of(codes: Array, precision: str, scale: Array | float) -> Array:
    """The float32 numbers that codes stand for."""
    if precision != "int8":
        import ml_dtypes

        codes = codes.view(ml_dtypes.float8_e4m3fn if precision == "fp8" else ml_dtypes.bfloat16)
    numbers: Array = codes.astype(np.float32) * np.asarray(scale, dtype=np.float32)
    return numbers


def steps_apart(codes: Array, others: Array, precision: str) -> Array:
    """The number of steps between codes, int32: neighbouring codes are one step apart, but see SUMS_APART."""
    if precision == "bf16":
        one, other = (numbers_of(x, precision, 1.0).astype(np.float64) for x in (codes, others))
        sums = max(SUMS_APART * float(np.sqrt(np.square(other).sum() / max(other.size, 1))), SMALLEST_MAXIMUM)
        # a step is more than a 256th of a number, and at most twice that
        step = np.maximum(np.abs(one), np.abs(other)) * 2.0**-7
        apart: Array = np.ceil(np.maximum(np.abs(one - other) - sums, 0) / np.maximum(step, sums)).astype(np.int32)
        return apart
    if precision == "int8":
        codes, others = codes.astype(np.int32), others.astype(np.int32)
    else:
        codes, others = order_of_float8(codes), order_of_float8(others)
    steps: Array = np.abs(codes - others)
    return steps


def order_of_float8(codes: Array) -> Array:
    """The place of float8 numbers in their order: the bytes are a sign and a magnitude."""
    magnitude = (codes & 0x7F).astype(np.int32)
    return np.where(codes & 0x80, -magnitude, magnitude)
