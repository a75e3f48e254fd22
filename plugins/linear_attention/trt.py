"""The TensorRT plugins of `effexport::EluLinearAttention`: states of slices, their sums, and the outputs."""

from __future__ import annotations

from collections.abc import Mapping

from effexport.plugins.linear_attention import SIGNATURE
from effexport.plugins.trt_plugin import LARGEST_DIM, Launch, Plugin, Rewrite, Size, Sizes, cdiv, maximum, minimum

# as in kernel_cuda.cu; a test compares the launches
SIDE = 64
SLICE = 512
CAUSAL_SLICE = 256
MOST_SLICES = 256
BLOCK_THREADS = 128
WARPS = BLOCK_THREADS // 32
COMBINE_THREADS = 256
STATE_QUADS = BLOCK_THREADS * 9
STATE_FLOATS = 4 * STATE_QUADS

OPERATOR, INPUTS = SIGNATURE.onnx_name, tuple(map(str, SIGNATURE.inputs))


def states_of_slices(name: str) -> str:
    return f"{name}: float32 [batch heads slices blocks {STATE_FLOATS}]"


def slices(s: Sizes) -> Mapping[str, Size]:
    """The slices of a sequence. least: the shortest slice; of one tile if all are."""
    length = SIDE if s.least == SIDE else maximum(cdiv(cdiv(s.seq, MOST_SLICES), SIDE) * SIDE, s.least)
    return {"slice": length, "slices": cdiv(s.seq, length)}


def shared_bytes(s: Sizes, tiles: int) -> int:
    """Tiles, a column of 64, 64 exponents, and two maxima of every warp."""
    return int(tiles * SIDE * SIDE * s.itemsize + SIDE * (s.itemsize + 4) + 2 * WARPS * 4)


def sizes_of_kernels(s: Sizes) -> tuple[Size, ...]:
    return (s.batch * s.heads, s.heads, s.seq, s.head_dim, s.value_dim, s.slice, s.relu)


def states(s: Sizes) -> Launch:
    blocks = s.batch * s.heads * s.slices * s.blocks
    return Launch(blocks, BLOCK_THREADS, (*sizes_of_kernels(s), s.slices), shared_bytes(s, 2))


def combine(s: Sizes) -> Launch:
    heads = s.batch * s.heads
    quads = s.blocks * STATE_QUADS
    # no heads if they have no slices, to whose first the sum would be written
    scalars = (minimum(heads, heads * s.slices), s.slices, quads, s.causal)
    return Launch(cdiv(heads * quads, COMBINE_THREADS), COMBINE_THREADS, scalars)


def outputs(s: Sizes, tiles: int, *scalars: Size) -> Launch:
    """scalars: those between the sizes and eps."""
    blocks = s.batch * s.heads * s.slices * cdiv(s.value_dim, SIDE)
    return Launch(blocks, BLOCK_THREADS, (*sizes_of_kernels(s), *scalars, s.eps), shared_bytes(s, tiles))


STATES = Plugin(
    name="EluLinearAttentionStates",
    op=OPERATOR,
    entry="effexport_linear_attention_states_{T}",
    inputs=INPUTS[1:],
    outputs=(states_of_slices("states"),),
    attributes={"least": int, "relu": int},
    at_least={"least": SIDE},
    sizes=lambda s: {**slices(s), "blocks": cdiv(s.head_dim, SIDE) * cdiv(s.value_dim, SIDE)},
    launch=states,
)
COMBINE = Plugin(
    name="EluLinearAttentionCombine",
    op=OPERATOR,
    entry="effexport_linear_attention_combine",
    inputs=(states_of_slices("states"),),
    outputs=(states_of_slices("sums"),),
    attributes={"causal": int},
    launch=combine,
)
OUTPUTS = Plugin(
    name="EluLinearAttentionOutputs",
    op=OPERATOR,
    entry="effexport_linear_attention_outputs_{T}",
    inputs=(INPUTS[0], states_of_slices("sums")),
    outputs=("out: T [batch heads seq value_dim]",),
    attributes={"eps": float, "least": int, "relu": int, "value_dim": int},
    at_least={"least": SIDE, "value_dim": 1},
    sizes=lambda s: {"slice": slices(s)["slice"]},
    launch=lambda s: outputs(s, 2, 1),  # one state: the sum of all
)
CAUSAL_OUTPUTS = Plugin(
    name="EluLinearAttentionCausalOutputs",
    op=OPERATOR,
    entry="effexport_linear_attention_causal_outputs_{T}",
    inputs=(*INPUTS, states_of_slices("sums")),
    outputs=("out: T [batch heads seq value_dim]",),
    attributes={"eps": float, "least": int, "relu": int},
    at_least={"least": SIDE},
    sizes=lambda s: {"slice": slices(s)["slice"]},
    # float32 has room for two tiles; a block has a slice, with the sums before it
    launch=lambda s: outputs(s, 4 if s.itemsize == 2 else 2, 0),
)


def nodes(s: Sizes) -> str:
    """Causal slices with several blocks of keys are one tile."""
    relu = int(s.relu != 0)
    least = SLICE if not s.causal else SIDE if s.head_dim > SIDE else CAUSAL_SLICE
    last = (
        f"EluLinearAttentionCausalOutputs <eps: float = @eps, least = {least}, relu = {relu}> (q, k, v, keep, sums)"
        if s.causal
        else f"EluLinearAttentionOutputs <eps: float = @eps, least = {least}, relu = {relu}, value_dim = {s.value_dim}>"
        " (q, sums)"
    )
    return f"""
        states = effexport.EluLinearAttentionStates <least = {least}, relu = {relu}> (k, v, keep)
        sums = effexport.EluLinearAttentionCombine <causal = {int(s.causal != 0)}> (states)
        out = effexport.{last}
    """


IN_STEPS = Rewrite(
    **SIGNATURE.trt_node(),
    later={"relu": 0},
    fixed={"head_dim": range(1, LARGEST_DIM), "value_dim": range(1, LARGEST_DIM)},
    nodes=nodes,
)
PLUGINS = (STATES, COMBINE, OUTPUTS, CAUSAL_OUTPUTS)
CHOICES = (IN_STEPS,)
