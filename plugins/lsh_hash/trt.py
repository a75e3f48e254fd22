"""The TensorRT plugin of `effexport::LSHHash`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from effexport.plugins.lsh_hash import SIGNATURE
from effexport.plugins.trt_plugin import INT32_MAX, Launch, Plugin, Sizes, cdiv

# as in kernel_cuda.cu; a test compares the launches
BLOCK_THREADS = 128
TOKENS = 128
DIRECTIONS = 64


def code_of_halves(halves: Sequence[int]) -> int:
    """As Halves::code() in kernel.h: all in one number of 64 bits."""
    code = 0
    for half in reversed(halves):
        n = half.bit_length() - 1
        code = (code << n | half - (1 << n)) << (n + 1) | 1 << n
    return code


def as_int32(bits: int) -> int:
    """The number of which these are the lowest 32 bits."""
    return (bits + 2**31) % 2**32 - 2**31


def why_not_factors(sizes: Mapping[str, int | str | None], attributes: Mapping[str, Any]) -> str | None:
    factors = list(attributes["bucket_factors"])
    if factors and all(factor % 2 == 0 for factor in factors) and math.prod(factors) <= INT32_MAX:
        return None
    return f"`bucket_factors` is {factors}; the TensorRT plugin takes even numbers with a product below 2^31."


def launch(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    code = code_of_halves([factor // 2 for factor in s.bucket_factors])
    sizes = (groups, s.heads, s.seq, s.padded, s.head_dim, s.rounds, s.width)
    scalars = (*sizes, math.prod(s.bucket_factors), as_int32(code), as_int32(code >> 32))
    # the projections of a tile
    return Launch(groups * cdiv(s.padded, TOKENS), BLOCK_THREADS, scalars, 4 * TOKENS * DIRECTIONS)


HASH = Plugin(
    **SIGNATURE.trt_plugin(),
    entry="effexport_lsh_hash_{T}",
    further=why_not_factors,
    sizes=lambda s: {
        "rows": s.batch * s.heads * s.rounds,
        "padded": cdiv(s.seq, s.chunk_length) * s.chunk_length,
    },
    launch=launch,
)
PLUGINS = (HASH,)
CHOICES = (HASH,)
