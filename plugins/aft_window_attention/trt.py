"""The TensorRT plugins of `effexport::AFTWindowAttention`: sums of blocks, of those around each, and the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effexport.plugins.aft_window_attention import SIGNATURE
from effexport.plugins.trt_plugin import LARGEST_DIM, Launch, Plugin, Rewrite, Sizes, cdiv

# as in kernel_cuda.cu; a test compares the launches
CHANNELS = 32
BLOCK = 32
WARP = 32
BLOCK_THREADS = 256
PARTS = 3
ROWS_OF_A_WARP = 16
COLUMNS = 2 * CHANNELS

OPERATOR, INPUTS = SIGNATURE.onnx_name, tuple(map(str, SIGNATURE.inputs))


def sums_of_blocks(name: str) -> str:
    return f"{name}: float32 [batch heads blocks {PARTS} channels]"


def sums(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    works = groups * s.blocks * cdiv(s.channels, CHANNELS)
    return Launch(
        cdiv(works, BLOCK_THREADS // WARP), BLOCK_THREADS, (groups, s.heads, s.seq, s.channels, s.key_channels)
    )


def others(s: Sizes) -> Launch:
    groups = s.batch * s.heads
    shared_bytes = BLOCK_THREADS * PARTS * 4
    scalars = (groups, s.blocks, s.channels, s.forward)
    return Launch(groups * cdiv(s.channels, CHANNELS), BLOCK_THREADS, scalars, shared_bytes)


def attend(s: Sizes, causal: bool) -> Launch:
    groups = s.batch * s.heads
    warps = 2 if causal else 4
    queries = warps * ROWS_OF_A_WARP
    own = 2 * BLOCK * CHANNELS if causal else 0
    # weights, columns, the largest bias of each query, the largest key of each channel, and own keys
    shared_bytes = 4 * (queries * BLOCK + BLOCK * COLUMNS + queries + CHANNELS + own)
    scalars = (groups, s.heads, s.seq, s.channels, s.key_channels, s.bias_heads, s.positions, s.taps)
    return Launch(groups * cdiv(s.seq, queries) * cdiv(s.channels, CHANNELS), warps * WARP, scalars, shared_bytes)


SUMS = Plugin(
    name="AFTWindowAttentionSums",
    op=OPERATOR,
    entry="effexport_aft_window_sums_{T}",
    inputs=INPUTS[1:4],
    outputs=(sums_of_blocks("sums"),),
    sizes=lambda s: {"blocks": cdiv(s.seq, BLOCK)},
    launch=sums,
)
OTHERS = Plugin(
    name="AFTWindowAttentionOthers",
    op=OPERATOR,
    entry="effexport_aft_window_others",
    inputs=(sums_of_blocks("sums"),),
    outputs=(sums_of_blocks("others"),),
    attributes={"forward": int},
    launch=others,
)
ATTEND, CAUSAL = (
    Plugin(
        name=f"AFTWindowAttention{name}",
        op=OPERATOR,
        entry=f"effexport_aft_window_{name.lower()}_{{T}}",
        inputs=(*INPUTS, *map(sums_of_blocks, ("sums", "before", "after"))),
        outputs=("out: T [batch heads seq channels]",),
        launch=launch,
    )
    for name, launch in (("Attend", lambda s: attend(s, False)), ("Causal", lambda s: attend(s, True)))
)


def nodes(s: Sizes) -> str:
    """A causal kernel reads no sums of later blocks."""
    name, after = ("Causal", "before") if s.causal else ("Attend", "after")
    return f"""
        sums = effexport.AFTWindowAttentionSums (k, v, keep)
        before = effexport.AFTWindowAttentionOthers <forward = 1> (sums)
        {"" if s.causal else "after = effexport.AFTWindowAttentionOthers <forward = 0> (sums)"}
        out = effexport.AFTWindowAttention{name} (q, k, v, keep, bias, sums, before, {after})
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
