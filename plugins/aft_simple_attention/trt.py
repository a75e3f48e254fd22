"""The TensorRT plugins of `effexport::AFTSimpleAttention`: sums of slices, their merge, and the gate."""

from __future__ import annotations

from effexport.plugins.aft_simple_attention import SIGNATURE
from effexport.plugins.trt_plugin import Launch, Plugin, Rewrite, Size, Sizes, cdiv, minimum

# as in kernel_cuda.cu; a test compares the launches
BLOCK_THREADS = 128
WIDTH = 64
MAX_ROWS = 16
SLICE = 256
PARTS = 3
MOST_BLOCKS = 65536

OPERATOR, INPUTS = SIGNATURE.onnx_name, tuple(map(str, SIGNATURE.inputs))
PARTIALS = f"partials: float32 [batch heads slices {PARTS} channels]"
CONTEXTS = "contexts: float32 [batch heads channels]"


def blocks(s: Sizes) -> Size:
    return minimum(s.batch * s.heads * cdiv(s.seq, SLICE) * cdiv(s.channels, WIDTH), MOST_BLOCKS)


def sums(s: Sizes) -> Launch:
    shared_bytes = 4 * PARTS * MAX_ROWS * WIDTH
    return Launch(blocks(s), BLOCK_THREADS, (s.batch * s.heads, s.heads, s.seq, s.channels), shared_bytes)


def merge(s: Sizes) -> Launch:
    heads = s.batch * s.heads
    merging = cdiv(heads * s.channels, BLOCK_THREADS)
    return Launch(minimum(merging, MOST_BLOCKS), BLOCK_THREADS, (heads, s.slices, s.channels))


def gate(s: Sizes) -> Launch:
    return Launch(blocks(s), BLOCK_THREADS, (s.batch * s.heads, s.seq, s.channels))


SUMS = Plugin(
    name="AFTSimpleAttentionSums",
    op=OPERATOR,
    entry="effexport_aft_simple_sums_{T}",
    inputs=INPUTS[1:],
    outputs=(PARTIALS,),
    sizes=lambda s: {"slices": cdiv(s.seq, SLICE)},
    launch=sums,
)
MERGE = Plugin(
    name="AFTSimpleAttentionMerge",
    op=OPERATOR,
    entry="effexport_aft_simple_merge",
    inputs=(PARTIALS,),
    outputs=(CONTEXTS,),
    launch=merge,
)
GATE = Plugin(
    name="AFTSimpleAttentionGate",
    op=OPERATOR,
    entry="effexport_aft_simple_gate_{T}",
    inputs=(INPUTS[0], CONTEXTS),
    outputs=("out: T [batch heads seq channels]",),
    launch=gate,
)
IN_STEPS = Rewrite(
    **SIGNATURE.trt_node(),
    nodes=lambda s: (
        """
        partials = effexport.AFTSimpleAttentionSums (k, v, keep)
        contexts = effexport.AFTSimpleAttentionMerge (partials)
        out = effexport.AFTSimpleAttentionGate (q, contexts)
    """
    ),
)
PLUGINS = (SUMS, MERGE, GATE)
CHOICES = (IN_STEPS,)
