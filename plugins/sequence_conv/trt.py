"""The TensorRT plugin of `effexport::SequenceConv`."""

from __future__ import annotations

from effexport.plugins.sequence_conv import SIGNATURE
from effexport.plugins.trt_plugin import LARGEST_DIM, Launch, Plugin, Sizes, cdiv

# as in kernel_cuda.cu; a test compares the launches
BLOCK_THREADS = 128
TOKENS = 64
WIDTH = 64
WINDOW = 128
BAND = WINDOW + TOKENS


def launch(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    # rows of x, and a tap or two for each place of the band
    shared_bytes = WINDOW * WIDTH * s.itemsize + BAND * 4
    scalars = (groups, s.heads, s.seq, s.channels, s.taps)
    return Launch(groups * cdiv(s.seq, TOKENS) * cdiv(s.channels, WIDTH), BLOCK_THREADS, scalars, shared_bytes)


CONV = Plugin(
    **SIGNATURE.trt_plugin(),
    entry="effexport_sequence_conv_{T}",
    fixed={"taps": range(1, LARGEST_DIM, 2)},
    launch=launch,
)
PLUGINS = (CONV,)
CHOICES = (CONV,)
