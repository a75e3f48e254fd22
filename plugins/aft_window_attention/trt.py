"""The TensorRT plugins of `effexport::AFTWindowAttention`: sums of blocks, those around windows, and the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effexport.plugins.aft_window_attention import SIGNATURE
from effexport.plugins.trt_plugin import LARGEST_DIM, Launch, Plugin, Rewrite, Sizes, cdiv, minimum

# as in kernel_cuda.cu; a test compares the launches
CHANNELS = 32
BLOCK = 32
WARP = 32
WARPS = 8
BLOCK_THREADS = WARPS * WARP
PARTS = 3
ROWS_OF_A_WARP = 16
COLUMNS = 2 * CHANNELS

OPERATOR, INPUTS = SIGNATURE.onnx_name, tuple(map(str, SIGNATURE.inputs))


def queries_of(causal: bool) -> int:
    return (2 if causal else 4) * ROWS_OF_A_WARP


def sums_of(rows: str, name: str) -> str:
    return f"{name}: float32 [batch heads {rows} {PARTS} channels]"


def sums(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    scalars = (groups, s.heads, s.seq, s.channels, s.key_channels)
    return Launch(groups * cdiv(s.channels, CHANNELS) * s.runs, BLOCK_THREADS, scalars, BLOCK_THREADS * PARTS * 4)


def others(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    scalars = (groups, s.blocks, s.channels, s.taps, s.causal)
    blocks = groups * cdiv(s.channels, CHANNELS) * minimum(s.runs, WARPS)
    return Launch(blocks, BLOCK_THREADS, scalars, 2 * BLOCK_THREADS * PARTS * 4)


def attend(s: Sizes, causal: bool) -> Launch:
    groups = s.batch * s.heads
    queries = queries_of(causal)
    warps = queries // ROWS_OF_A_WARP
    own = 2 * BLOCK * CHANNELS if causal else 0
    # weights, columns, the largest bias of each query, the largest key of each channel; of each warp the range of
    # biases and the largest numbers; factors of columns; and own keys
    shared_floats = queries * BLOCK + BLOCK * COLUMNS + queries + CHANNELS + warps * (1 + CHANNELS) + COLUMNS + own
    scalars = (groups, s.heads, s.seq, s.channels, s.key_channels, s.bias_heads, s.positions, s.taps)
    blocks = groups * cdiv(s.seq, queries) * cdiv(s.channels, CHANNELS)
    return Launch(blocks, warps * WARP, scalars, 4 * shared_floats)


SUMS = Plugin(
    name="AFTWindowAttentionSums",
    op=OPERATOR,
    entry="effexport_aft_window_sums_{T}",
    inputs=INPUTS[1:4],
    outputs=(sums_of("blocks", "sums"), sums_of("runs", "runs")),
    sizes=lambda s: {"blocks": cdiv(s.seq, BLOCK), "runs": cdiv(s.seq, BLOCK * WARPS)},
    launch=sums,
)
OTHERS = Plugin(
    name="AFTWindowAttentionOthers",
    op=OPERATOR,
    entry="effexport_aft_window_others",
    inputs=(sums_of("blocks", "sums"), sums_of("runs", "runs")),
    outputs=(sums_of("windows", "others"),),
    attributes={"taps": int, "causal": int},
    # before each, and after each unless causal
    sizes=lambda s: {"windows": cdiv(s.blocks, queries_of(s.causal) // BLOCK) * (1 if s.causal else 2)},
    launch=others,
)
ATTEND, CAUSAL = (
    Plugin(
        name=f"AFTWindowAttention{name}",
        op=OPERATOR,
        entry=f"effexport_aft_window_{name.lower()}_{{T}}",
        inputs=(*INPUTS, sums_of("blocks", "sums"), sums_of("windows", "others")),
        outputs=("out: T [batch heads seq channels]",),
        launch=launch,
    )
    for name, launch in (("Attend", lambda s: attend(s, False)), ("Causal", lambda s: attend(s, True)))
)


def nodes(s: Sizes) -> str:
    return f"""
        sums, runs = effexport.AFTWindowAttentionSums (k, v, keep)
        others = effexport.AFTWindowAttentionOthers <taps = {s.taps}, causal = {s.causal}> (sums, runs)
        out = effexport.AFTWindowAttention{"Causal" if s.causal else "Attend"} (q, k, v, keep, bias, sums, others)
    """


def why_not_taps(sizes: Mapping[str, int | str | None], attributes: Mapping[str, Any]) -> str | None:
    """Taps lie around a query evenly if it also sees what follows."""
    taps = sizes["taps"]
    assert isinstance(taps, int)
    if attributes["causal"] or taps % 2:
        return None
    return f"The dimension taps of its inputs is {taps}, and `causal` is 0; the TensorRT plugin takes odd numbers."


IN_STEPS = Rewrite(
    **SIGNATURE.trt_node(),
    fixed={"taps": range(1, LARGEST_DIM)},
    further=why_not_taps,
    nodes=nodes,
)
PLUGINS = (SUMS, OTHERS, ATTEND, CAUSAL)
CHOICES = (IN_STEPS,)
