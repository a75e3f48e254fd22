"""`effexport::MaskedAttention` in TensorRT: one plugin for few keys, otherwise slices and their merge, or the standard
operator Attention."""

from __future__ import annotations

from collections.abc import Mapping

from effexport.plugins.masked_attention import SIGNATURE
from effexport.plugins.ops import FLOAT_TYPES
from effexport.plugins.trt_plugin import INT32_MAX, Launch, Plugin, Rewrite, Size, Sizes, cdiv, maximum, minimum

# as in kernel_cuda.cu and native/attention.h; a test compares the launches
WIDTH = 64
SLICE_STEP = 64
SLICE_QUERIES = 4
STATISTICS = 2
WARP = 32
ATTEND_THREADS = 128
MERGE_THREADS = 256
# keys of one slice for any number of queries
KEYS_OF_A_SLICE = SLICE_STEP * SLICE_QUERIES
LONGEST_SLICE = INT32_MAX // SLICE_STEP * SLICE_STEP
# two tiles of keys and their values, of any type
TILE_BYTES = 1 << 15

OPERATOR = SIGNATURE.onnx_name


def slices(s: Sizes) -> Mapping[str, Size]:
    """The slices of keys. row: floats of a row of partials."""
    length = minimum(maximum(cdiv(s.n, SLICE_STEP), 1) * KEYS_OF_A_SLICE, LONGEST_SLICE)
    return {"slice": length, "slices": cdiv(s.m, length), "row": s.e + STATISTICS}


def attend(s: Sizes, partial: bool) -> Launch:
    groups = s.batch * s.heads
    # of a block; and Source with what is known of three tiles of keys
    queries, side_bytes = (64, 476) if s.T == "float32" else (128, 860)
    blocks = groups * s.slices * cdiv(s.n, queries) * cdiv(s.e, WIDTH)
    scalars = (groups, s.heads, s.n, s.m, s.d, s.e, s.slice, s.scale, int(partial))
    return Launch(blocks, ATTEND_THREADS, scalars, TILE_BYTES + side_bytes)


def merge(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    rows = groups * s.n * cdiv(s.e, WARP)
    scalars = (groups, s.n, s.slices, s.e)
    return Launch(cdiv(rows, MERGE_THREADS // WARP), MERGE_THREADS, scalars)


WHOLE = Plugin(
    **SIGNATURE.trt_plugin(),
    entry="effexport_masked_attention_{T}",
    # without keys there is no slice, and only a merge writes zeros
    fixed={"m": range(1, KEYS_OF_A_SLICE + 1)},
    sizes=slices,
    launch=lambda s: attend(s, partial=False),
)
ATTEND = Plugin(
    **SIGNATURE.trt_node() | {"name": "MaskedAttentionAttend"},
    op=OPERATOR,
    entry="effexport_masked_attention_{T}",
    outputs=("partials: float32 [batch heads slices n row]",),
    sizes=slices,
    launch=lambda s: attend(s, partial=True),
)
# one for each type of the results, which no input has
MERGES = tuple(
    Plugin(
        name=f"MaskedAttentionMerge_{dtype}",
        op=OPERATOR,
        entry="effexport_masked_attention_merge_{T}",
        inputs=("partials: float32 [batch heads slices n row]",),
        outputs=("out: T [batch heads n e]",),
        types=(dtype,),
        sizes=lambda s: {"e": s.row - STATISTICS},
        launch=merge,
    )
    for dtype in FLOAT_TYPES
)


def nodes(s: Sizes) -> str:
    return f"""
        partials = effexport.MaskedAttentionAttend <scale: float = @scale> (q, k, v, keep)
        out = effexport.MaskedAttentionMerge_{s.T} (partials)
    """


IN_SLICES = Rewrite(**SIGNATURE.trt_node(), nodes=nodes)
PLUGINS = (WHOLE, ATTEND, *MERGES)
CHOICES = (WHOLE, IN_SLICES)


def attention(s: Sizes) -> str:
    """The standard operator, between nodes that keep our semantics.

    What Attention returns for a sample without any visible key depends on the runtime. Such a sample therefore sees all
    of its keys, and its queries become zeros, so that their weights are equal. Queries are multiplied by `scale` as in
    the function body; the factor of Attention itself would round queries and keys, each by its root.
    """
    return f"""
        scale = {s.scale:.9e}
        axes12 = [1, 2]
        last = [-1]
        kept = Cast <to = 6> (keep)
        most_kept = ReduceMax (kept, last)
        any_kept = Cast <to = 9> (most_kept)
        none_kept = Not (any_kept)
        keep_or_all = Or (keep, none_kept)
        visible = Unsqueeze (keep_or_all, axes12)
        sees_any = Unsqueeze (any_kept, axes12)
        q_float = Cast <to = 1> (q)
        scaled_float = Mul (q_float, scale)
        scaled = CastLike (scaled_float, q)
        zero_if_none = CastLike (sees_any, q)
        queries = Where (sees_any, scaled, zero_if_none)
        out = Attention <scale = 1.0> (queries, k, v, visible)
    """


# NVIDIA documents fused kernels for these types and head dimensions; q, k and v must have the same.
AS_ATTENTION = Rewrite(
    name=OPERATOR,
    inputs=("q: T [batch heads n d]", "k: T [batch heads m d]", "v: T [batch heads m d]", "keep: bool [batch m]"),
    attributes={"scale": float},
    fixed={"d": range(16, 257, 8)},
    types=("float16", "bfloat16"),
    title="TensorRT's fused attention",
    nodes=attention,
)
