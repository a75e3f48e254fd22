"""The TensorRT plugins of `effexport::LinearRecurrence`: one for all tokens, or three for slices of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effexport.plugins.linear_recurrence import SIGNATURE
from effexport.plugins.trt_plugin import LARGEST_DIM, Launch, Plugin, Rewrite, Size, Sizes, cdiv, fdiv, maximum

# as in kernel_cuda.cu and chunk.h; a test compares the launches
TOKENS = 16
VALUES = 64
MOST_KEYS = 128
BLOCK_THREADS = 128
SHORTEST_SLICE = 256
FEWEST_SLICES = 4
MOST_BLOCKS = 128
SHARED_BYTES = (23936, 36480)  # with keys of up to 64 channels, and of more

OPERATOR, INPUTS = SIGNATURE.onnx_name, tuple(map(str, SIGNATURE.inputs))
QUERY, KEY, VALUE, PAST, DECAY, BETA = INPUTS
MAPS = "maps: float32 [batch kv_heads earlier key_dim width]"
BEFORE = "before: float32 [batch kv_heads slices key_dim value_dim]"
KEYS = {"key_dim": range(1, MOST_KEYS + 1)}
FIXED = {**KEYS, "seq": range(LARGEST_DIM), "kv_heads": range(1, LARGEST_DIM), "value_dim": range(1, LARGEST_DIM)}


def whole_tokens(seq: Size) -> Size:
    """The tokens of a slice that has all of them."""
    return maximum(cdiv(seq, TOKENS), 1) * TOKENS


def slice_of(seq: int, kv_heads: int, value_dim: int) -> int:
    """The tokens of a slice."""
    slices = min(MOST_BLOCKS // (kv_heads * cdiv(value_dim, VALUES)), seq // SHORTEST_SLICE)
    return int(whole_tokens(cdiv(seq, slices) if slices >= FEWEST_SLICES else seq))


def launch(s: Sizes, blocks: Size, scalars: tuple[Size, ...]) -> Launch:
    small, large = SHARED_BYTES
    shared_bytes = fdiv(s.key_dim, MOST_KEYS // 2 + 1) * (large - small) + small
    return Launch(blocks, BLOCK_THREADS, scalars, shared_bytes)


def maps(s: Sizes) -> Launch:
    states = s.batch * s.kv_heads
    flags = (int(s.delta != 0), int(s.per_channel != 0))
    blocks = states * s.earlier * (cdiv(s.value_dim, VALUES) + cdiv(s.key_dim, VALUES))
    return launch(s, blocks, (states, s.seq, s.kv_heads, s.key_dim, s.value_dim, *flags, s.slice))


def states(s: Sizes) -> Launch:
    count = s.batch * s.kv_heads
    return launch(s, count * cdiv(s.value_dim, VALUES), (count, s.slices, s.key_dim, s.value_dim))


def outputs(s: Sizes) -> Launch:
    flags = (int(s.delta != 0), int(s.per_channel != 0))
    blocks = s.batch * s.heads * s.slices * cdiv(s.value_dim, VALUES)
    sizes = (s.batch * s.kv_heads, s.seq, s.heads, s.kv_heads, s.key_dim, s.value_dim)
    return launch(s, blocks, (*sizes, *flags, s.slice, s.scale))


WHOLE = Plugin(
    **SIGNATURE.trt_plugin(),
    entry="effexport_linear_recurrence_{T}",
    fixed=KEYS,
    sizes=lambda s: {"slice": whole_tokens(s.seq), "slices": 1},
    launch=outputs,
)
OF_SLICES = Plugin(
    name="LinearRecurrenceMaps",
    op=OPERATOR,
    entry="effexport_linear_recurrence_maps_{T}",
    inputs=(KEY, VALUE, DECAY, BETA),
    outputs=(MAPS,),
    attributes={"delta": int, "per_channel": int, "slice": int},
    at_least={"slice": TOKENS},
    fixed=KEYS,
    sizes=lambda s: {"earlier": cdiv(s.seq, s.slice) - 1, "width": s.value_dim + s.key_dim},
    launch=maps,
)
STATES = Plugin(
    name="LinearRecurrenceStates",
    op=OPERATOR,
    entry="effexport_linear_recurrence_states",
    inputs=(MAPS, PAST),
    outputs=(BEFORE,),
    fixed=KEYS,
    sizes=lambda s: {"slices": s.earlier + 1},
    launch=states,
)
OUTPUTS = Plugin(
    name="LinearRecurrenceOutputs",
    op=OPERATOR,
    entry="effexport_linear_recurrence_{T}",
    inputs=(QUERY, KEY, VALUE, BEFORE, DECAY, BETA),
    outputs=SIGNATURE.trt_plugin()["outputs"],
    attributes={"scale": float, "delta": int, "per_channel": int, "slice": int},
    at_least={"slice": TOKENS},
    fixed=KEYS,
    launch=outputs,
)


def is_whole(sizes: Mapping[str, int | str | None], attributes: Mapping[str, Any]) -> str | None:
    seq, kv_heads, value_dim = (int(sizes[name] or 0) for name in ("seq", "kv_heads", "value_dim"))
    return "Its tokens are one slice." if slice_of(seq, kv_heads, value_dim) >= seq else None


def nodes(s: Sizes) -> str:
    length, per_channel = slice_of(s.seq, s.kv_heads, s.value_dim), int(s.per_channel != 0)
    own = f"delta: int = @delta, per_channel = {per_channel}, slice = {length}"
    inputs = "query, key, value, before, decay, beta"
    return f"""
        maps = effexport.LinearRecurrenceMaps <{own}> (key, value, decay, beta)
        before = effexport.LinearRecurrenceStates (maps, past)
        out, present = effexport.LinearRecurrenceOutputs <scale: float = @scale, {own}> ({inputs})
    """


IN_SLICES = Rewrite(**SIGNATURE.trt_node(), fixed=FIXED, further=is_whole, nodes=nodes)
PLUGINS = (WHOLE, OF_SLICES, STATES, OUTPUTS)
CHOICES = (IN_SLICES, WHOLE)
