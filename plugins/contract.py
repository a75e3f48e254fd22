"""How an operator declares what it promises: the types, and helpers for its inputs.

Loads PyTorch and nothing else.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effexport.plugins.ops import FLOAT_TYPES

# The relative error of one rounding, which every kernel may make when it writes its results.
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}


@dataclass(frozen=True)
class Case:
    """One call of an operator's kernels.

    sizes and numbers: what gpu_check.cc takes, in its order; a flag is a size of 0 or 1. kind: which inputs to make.
    dtype: the type of the operator's T; "int32" for LSHSort.
    """

    sizes: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    kind: str = "random"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return " ".join([self.dtype, "×".join(map(str, self.sizes)), *map(str, self.numbers), self.kind])

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Output:
    """Shape and type of one output, which the caller allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Limit:
    """The largest error that passes: the largest difference over the reference's largest value. 0: equal integers."""

    value: float
    reason: str


def in_all_types(*cases: Case) -> tuple[Case, ...]:
    """The cases in float32, float16 and bfloat16."""
    return tuple(replace(case, dtype=dtype) for case in cases for dtype in FLOAT_TYPES)


def generator(case: Case, device: str) -> torch.Generator:
    """A source of random numbers for the inputs of a case."""
    return torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))


def normal(case: Case, source: torch.Generator, *shape: int) -> Tensor:
    """Normally distributed values of the case's type, on the device of the generator."""
    return torch.randn(shape, generator=source, dtype=case.torch_dtype, device=source.device)


def random_mask(source: torch.Generator, *shape: int) -> Tensor:
    """A mask that is true for two thirds of all elements, on average."""
    return torch.rand(shape, generator=source, device=source.device) < 2 / 3


def token_mask(source: torch.Generator, batch: int, seq: int) -> Tensor:
    """A mask [batch, seq] that hides a tenth of all tokens, and the last quarter of the last sample."""
    keep = torch.rand(batch, seq, generator=source, device=source.device) < 0.9
    keep[-1, seq - seq // 4 :] = False
    return keep


# Kinds of inputs where a token has logits so far above all others that e^x is infinite unless their own maximum is
# taken off: where this token is. What merges maxima of parts must not miss one.
PEAKS = ("first", "middle", "last")
# Of such a logit, where all others are about 1. float32 and all half types have it exactly.
PEAK_LOGIT = 128.0


def peak(kind: str, tokens: int) -> slice:
    """The token with such logits; none of any kind but PEAKS."""
    if kind not in PEAKS:
        return slice(0, 0)
    start = {"first": 0, "middle": tokens // 2, "last": tokens - 1}[kind]
    return slice(start, start + 1)


def with_peaks(case: Case) -> tuple[Case, ...]:
    """The case with each of PEAKS."""
    return tuple(replace(case, kind=kind) for kind in PEAKS)
