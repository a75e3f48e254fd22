"""The TensorRT plugins of `effexport::LSHAttention`: what all rounds need, the rounds, and what they are together."""

from __future__ import annotations

from collections.abc import Mapping

from effexport.plugins.lsh_attention import SIGNATURE
from effexport.plugins.trt_plugin import LARGEST_DIM, Launch, Plugin, Rewrite, Size, Sizes, cdiv, fdiv, maximum

# as in kernel_cuda.cu and native/attention.h; a test compares the launches
BLOCK_THREADS = 256
ATTEND_THREADS = 128
VECTORS = 32
QUERIES = 64
WIDTH = 64
CHUNK_BYTES = 16
# two tiles of keys and their values, of any type
TILE_BYTES = 1 << 15

OPERATOR = SIGNATURE.onnx_name
QK, V, ORDER, _, KEEP = map(str, SIGNATURE.inputs)
SCALES, KEPT = "scales: float32 [batch heads seq]", "kept: int32 [batch]"
CONTEXTS = "contexts: T [batch heads rounds seq value_dim]"
LSES = "lses: float32 [batch heads rounds seq]"
NODE = SIGNATURE.trt_node()
ATTRIBUTES = NODE["attributes"]


def prepare(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    return Launch(s.batch + cdiv(groups * s.seq, VECTORS), BLOCK_THREADS, (groups, s.heads, s.seq, s.head_dim), 4)


def rounds(s: Sizes) -> Mapping[str, Size]:
    return {"rounds": fdiv(s.rows, maximum(s.batch * s.heads, 1))}


def attend(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    chunks = fdiv(s.padded, s.chunk_length) * s.rounds
    blocks = groups * chunks * cdiv(s.chunk_length, QUERIES) * cdiv(s.value_dim, WIDTH)
    sizes = (groups, s.heads, s.seq, s.padded, s.rounds, s.head_dim, s.value_dim)
    flags = (int(flag != 0) for flag in (s.causal, s.circular, s.rounded))
    scalars = (*sizes, s.chunk_length, s.chunks_before, s.chunks_after, *flags)
    source_bytes = 1920 if s.T == "float32" else 3456
    return Launch(blocks, ATTEND_THREADS, scalars, TILE_BYTES + source_bytes)


def combine(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    chunks = s.seq * cdiv(s.value_dim, CHUNK_BYTES // s.itemsize)
    scalars = (groups, s.seq, s.rounds, s.value_dim, int(s.rounded != 0))
    return Launch(groups * cdiv(chunks, BLOCK_THREADS), BLOCK_THREADS, scalars)


PREPARE = Plugin(
    name="LSHAttentionPrepare",
    op=OPERATOR,
    entry="effexport_lsh_attention_prepare_{T}",
    inputs=(QK, KEEP),
    outputs=(SCALES, KEPT),
    launch=prepare,
)
ATTEND = Plugin(
    name="LSHAttentionAttend",
    op=OPERATOR,
    entry="effexport_lsh_attention_{T}",
    inputs=(QK, V, ORDER, SCALES, KEPT),
    outputs=(CONTEXTS, LSES),
    attributes=ATTRIBUTES,
    at_least={"chunk_length": 1},
    sizes=rounds,
    launch=attend,
)
COMBINE = Plugin(
    name="LSHAttentionCombine",
    op=OPERATOR,
    entry="effexport_lsh_attention_combine_{T}",
    inputs=(CONTEXTS, LSES),
    outputs=("out: T [batch heads seq value_dim]",),
    attributes={"rounded": int},
    launch=combine,
)


def nodes(s: Sizes) -> str:
    attributes = ", ".join(f"{name}: int = @{name}" for name in ATTRIBUTES)
    return f"""
        scales, kept = effexport.LSHAttentionPrepare (qk, keep)
        contexts, lses = effexport.LSHAttentionAttend <{attributes}> (qk, v, order, scales, kept)
        out = effexport.LSHAttentionCombine <rounded: int = @rounded> (contexts, lses)
    """


IN_STEPS = Rewrite(
    **NODE,
    # the kernel of the rounds divides columns among blocks, at least one for each
    fixed={"value_dim": range(1, LARGEST_DIM)},
    nodes=nodes,
)
PLUGINS = (PREPARE, ATTEND, COMBINE)
CHOICES = (IN_STEPS,)
