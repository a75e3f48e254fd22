"""The TensorRT plugin of `effexport::IterativePinv`: matrices that fit into 48 KiB of shared memory, the most that an
ahead-of-time plugin can ask for: it cannot opt in to more, which the kernel of larger ones needs."""

from __future__ import annotations

from effexport.plugins.iterative_pinv import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Sizes

# as in tensor_cores.h; a test compares the launches
MAX_M = 64
BLOCK_THREADS = 256
# two matrices of the largest size, each as two of halves, and 128 bytes for the scales of their parts
SHARED_BYTES = 2 * (2 * MAX_M * MAX_M * 2 + 128)


def launch(s: Sizes) -> Launch:
    return Launch(s.N, BLOCK_THREADS, (s.N, s.m, s.iterations), SHARED_BYTES)


PINV = Plugin(
    **SIGNATURE.trt_plugin(),
    entry="effexport_iterative_pinv_{T}",
    fixed={"m": range(1, MAX_M + 1)},
    launch=launch,
)
PLUGINS = (PINV,)
CHOICES = (PINV,)
