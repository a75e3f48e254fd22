"""The TensorRT plugin of `effexport::LSHSort`."""

from __future__ import annotations

from effexport.plugins.lsh_sort import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Sizes, cdiv, fdiv, maximum, minimum

# as in kernel_cuda.cu; a test compares the launches
WARPS = 16
BLOCK_THREADS = 32 * WARPS
TILE = 8192
MAX_RADIX = 1216
RADIX_OF_SEVERAL_PASSES = 1024
ENOUGH_BLOCKS = 128


def launch(s: Sizes) -> Launch:
    one_pass = s.num_buckets <= MAX_RADIX
    radix = s.num_buckets if one_pass else RADIX_OF_SEVERAL_PASSES
    # several blocks for a row if rows are few
    parts = minimum(maximum(fdiv(ENOUGH_BLOCKS, maximum(s.N, 1)), 1), cdiv(s.n, TILE)) if one_pass else 1
    # totals of the warps, two places for each value of a digit, and 16-bit counters for each warp or a sorted tile
    shared_bytes = 4 * (WARPS + 2 * radix + max(radix * WARPS // 2, TILE))
    return Launch(s.N * parts, BLOCK_THREADS, (s.N, s.n, s.num_buckets), shared_bytes)


SORT = Plugin(**SIGNATURE.trt_plugin(), entry="effexport_lsh_sort", launch=launch)
PLUGINS = (SORT,)
CHOICES = (SORT,)
