"""The TensorRT plugin of `effexport::SegmentMeans`."""

from __future__ import annotations

from effexport.plugins.segment_means import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Sizes, cdiv

# as in kernel_cuda.cu; a test compares the launches
BLOCK_THREADS = 128
WIDTH = 64
MAX_ROWS = 16
WARPS = BLOCK_THREADS // 32


def launch(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    # a sum of each row and channel, a count of each row, and a length of each warp
    shared_bytes = 4 * (MAX_ROWS * WIDTH + MAX_ROWS + WARPS)
    scalars = (groups, s.heads, s.seq, s.channels, s.num_segments)
    return Launch(groups * cdiv(s.channels, WIDTH) * s.num_segments, BLOCK_THREADS, scalars, shared_bytes)


MEANS = Plugin(**SIGNATURE.trt_plugin(), entry="effexport_segment_means_{T}", launch=launch)
PLUGINS = (MEANS,)
CHOICES = (MEANS,)
