"""The TensorRT plugin of `effexport::CausalConv`."""

from __future__ import annotations

from effexport.plugins.causal_conv import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Sizes, cdiv, maximum

# as in kernel_cuda.cu; a test compares the launches
BLOCK_THREADS = 128
TOKENS = 32


def launch(s: Sizes) -> Launch:
    # without tokens, there is a state to copy
    spans = maximum(cdiv(s.seq, TOKENS), 1)
    scalars = (s.batch, s.seq, s.channels, s.taps, int(s.silu != 0))
    return Launch(s.batch * spans * cdiv(s.channels, BLOCK_THREADS), BLOCK_THREADS, scalars)


CONV = Plugin(**SIGNATURE.trt_plugin(), entry="effexport_causal_conv_{T}", launch=launch)
PLUGINS = (CONV,)
CHOICES = (CONV,)
