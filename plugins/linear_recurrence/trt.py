"""The TensorRT plugin of `effexport::LinearRecurrence`."""

from __future__ import annotations

from effexport.plugins.linear_recurrence import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Sizes, cdiv

# as in kernel_cuda.cu; a test compares the launches
BLOCK_THREADS = 32


def launch(s: Sizes) -> Launch:
    states = s.batch * s.kv_heads
    flags = (int(s.delta != 0), int(s.per_channel != 0))
    scalars = (states, s.seq, s.heads, s.kv_heads, s.key_dim, s.value_dim, *flags, s.scale)
    return Launch(states * cdiv(s.value_dim, BLOCK_THREADS), BLOCK_THREADS, scalars)


RECURRENCE = Plugin(**SIGNATURE.trt_plugin(), entry="effexport_linear_recurrence_{T}", launch=launch)
PLUGINS = (RECURRENCE,)
CHOICES = (RECURRENCE,)
