"""The contract of BandedAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from effexport.plugins.banded_attention import SIGNATURE
from effexport.plugins.banded_attention.op import in_band, offsets
from effexport.plugins.contract import (
    PEAK_LOGIT,
    PEAKS,
    AtMost,
    Case,
    Contract,
    FasterThan,
    Limit,
    Timed,
    Work,
    attention_core,
    in_all_types,
    parts,
    peak,
    random_mask,
    sdpa_baselines,
    with_peaks,
)

SCALE = (0.4,)


def case_of(
    *sizes: int,
    left: int = 0,
    right: int = 0,
    block: int = 1,
    causal: int = 0,
    globals_: int = 0,
    bias: int = 0,
    kind: str = "random",
) -> Case:
    """A case in float32. sizes: batch, heads, n, d, e."""
    count = offsets(left, right, block) if bias else 1
    return Case((*sizes, left, right, block, causal, globals_, bias, count), SCALE, kind)


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Some keys are hidden, all keys of the last of several samples. Each sample has other global tokens.

    Kind "few": the first token is global, and no other; nothing is hidden. Kind "ends": the first and the last one.
    Kind "many": every tenth. Kind "all": all tokens are global. Kind "mean": all weights are alike. PEAKS: the logits
    of a key are far above all others, and all are exact.
    """
    batch, heads, n, d, e, *_, count = case.sizes
    source = case.generator(device)
    shapes = {"q": d, "k": d, "v": e, "q_global": d, "k_global": d, "v_global": e}
    tensors = {name: case.normal(source, batch, heads, n, width) for name, width in shapes.items()}
    keep = random_mask(source, batch, n)
    is_global = torch.rand(batch, n, generator=source, device=device) < 0.1
    bias = case.normal(source, heads, count)
    if case.kind in PEAKS:
        highest = peak(case.kind, n)
        for q, k in (("q", "k"), ("q_global", "k_global")):
            tensors[q][..., 0], tensors[k][..., 0] = PEAK_LOGIT / 8, 0
            tensors[k][:, :, highest] = 0
            tensors[k][:, :, highest, 0] = 8 / case.numbers[0]
        keep[:, highest] = True
    if case.kind == "mean":
        tensors |= {name: torch.zeros_like(tensors[name]) for name in ("q", "q_global")}
    tokens = torch.arange(n, device=device)
    chosen = {"few": tokens < 1, "ends": tokens % max(n - 1, 1) == 0, "many": tokens % 10 == 0, "all": tokens >= 0}
    if case.kind in ("mean", *chosen):
        keep, is_global = torch.ones_like(keep), chosen.get(case.kind, tokens < 0).expand_as(keep).clone()
    elif batch > 1:
        keep[-1] = False
    return {**tensors, "keep": keep, "is_global": is_global, "bias": bias}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A softmax over what each query sees, in float64: the sum of e^(logit − highest), and 0 where nothing is seen."""
    q, k, v, qg, kg, vg = (x.double() for x in list(inputs.values())[:6])
    keep, is_global, bias = list(inputs.values())[6:]
    _, _, n, _, _, left, right, block, causal, with_globals, with_bias, _ = case.sizes
    if not with_globals:
        is_global = torch.zeros_like(is_global)
    distance, near = in_band(n, slice(None), left, right, block, q.device)
    own_row, own_key = is_global[:, None, :, None], is_global[:, None, None, :]
    visible = (own_row | own_key | near) & keep[:, None, None]
    if causal:
        visible = visible & (distance <= 0)
    logits = case.numbers[0] * torch.where(own_row, qg @ kg.mT, q @ k.mT)
    if with_bias:
        added = bias.double()[:, (distance + left + block - 1).clamp(0, bias.shape[1] - 1)]
        logits = logits + torch.where(own_row | own_key, 0, added)
    logits = logits.masked_fill(~visible, -torch.inf)
    powers = (logits - logits.amax(dim=-1, keepdim=True).clamp(min=-1e300)).exp()
    weights = powers / powers.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    return {"out": torch.where(own_row, weights @ vg, weights @ v)}


def intermediate(case: Case) -> int:
    """The logits."""
    return case.sizes[1] * case.sizes[2] ** 2


def limit(case: Case) -> Limit:
    # float32 weights are not rounded: one of its roundings more makes no difference to 2e-5
    reason = "2e-5 for values of about 1, and in half types one rounding of weights and one of results"
    return Limit(2e-5 + 2 * case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """PyTorch's own attention with a mask, of a case in which all samples have the same global tokens, and without."""
    q, k, v, q_global, k_global, v_global, keep, is_global, _ = inputs.values()
    _, _, n, _, _, left, right, block, _, with_globals, *_ = case.sizes
    scale = case.numbers[0]
    visible = in_band(n, slice(None), left, right, block, q.device)[1] & keep[:, None, None]
    if with_globals:
        visible = visible | (keep & is_global)[:, None, None]
    rows = is_global[0].nonzero().squeeze(1)

    def masked() -> Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        if with_globals:
            of_rows = scaled_dot_product_attention(q_global[:, :, rows], k_global, v_global, scale=scale)
            out[:, :, rows] = of_rows
        return out

    return {"SDPA masked": masked, **sdpa_baselines(q, k, v, scale)}


def near_tiles(case: Case, keys: int) -> tuple[float, float]:
    """Tiles of so many near keys that a block of 64 queries takes on average, and how many of them it does not see
    whole."""
    _, _, n, _, _, left, right, block, causal, *_ = case.sizes
    tiles = whole = 0
    for first in range(0, n, 64):
        last = min(first + 63, n - 1)
        begin, last_begin = (max(query - query % block - left, 0) for query in (first, last))
        first_end, end = (
            min(query - query % block + block + right, query + 1 if causal else n, n) for query in (first, last)
        )
        tiles += parts(end - begin, keys)
        whole += max(0, (first_end - begin) // keys - parts(last_begin - begin, keys))
    return tiles / parts(n, 64), (tiles - whole) / parts(n, 64)


def work(case: Case) -> Work:
    """The core over the near keys of each 64 queries, and global keys; and over slices of all keys for global queries.

    Global tokens are counted as in kind "few": one of each sample. Of their queries, no other row is read.
    """
    batch, heads, n, d, e, *_, with_globals, _, _ = case.sizes
    size, keys = case.torch_dtype.itemsize, 32 if case.dtype == "float32" else 64
    columns = batch * heads * parts(e, 64)
    tiles, masked = near_tiles(case, keys)
    # an H100 has shared memory for blocks of two warps
    near, masked_tiles = tiles + with_globals, masked + with_globals
    core = attention_core(
        size, columns * parts(n, 64), near, d, fragments=2 if size == 2 and n >= 64 else 1, masked=masked_tiles
    )
    if not with_globals:
        return core
    slices, found = parts(n, 256), 4.0 * batch * (parts(n, 64) + 2)
    core += attention_core(size, columns * slices, parts(min(n, 256), keys), d, queries=1)
    partials = 4.0 * batch * heads * slices * (2 + e)
    return core + Work(scratch=found + partials, again=(found, found + partials + 2 * batch * n))


def timed(dtype: str, n: int) -> Timed:
    """Longformer base: 12 heads of 64, a window of 512, one global token."""
    large = case_of(1, 12, n, 64, 64, left=256, right=256, globals_=1, kind="few")
    small = case_of(1, 2, 70, 16, 16, left=8, right=8, globals_=1, kind="few")
    dense = FasterThan("SDPA flash" if dtype != "float32" else "SDPA memory-efficient", "a band must pay", times=2)
    bound = AtMost(3, "a row of tiles is short: its first and last loads are not hidden")
    return Timed(replace(large, dtype=dtype), replace(small, dtype=dtype), (bound, dense))


EMPTY = tuple(
    case_of(*sizes, left=2, right=2, globals_=1) for sizes in ((0, 2, 3, 40, 24), (2, 0, 3, 40, 24), (2, 2, 0, 40, 24))
)

CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads n d e left right block causal with_globals with_bias offsets",
    numbers="scale",
    inputs=inputs,
    exact=exact,
    limit=limit,
    intermediate=intermediate,
    shared=("bias",),
    small=in_all_types(
        case_of(1, 1, 1, 1, 1, kind="few"),
        case_of(2, 2, 20, 24, 40, left=5, right=3),
        case_of(1, 2, 130, 16, 16, left=16, right=16, globals_=1),
        case_of(2, 1, 100, 8, 8, left=20, causal=1, globals_=1, bias=1),
        case_of(1, 1, 100, 8, 72, left=16, right=16, block=16, globals_=1, kind="few"),
        case_of(1, 1, 70, 8, 8, left=8, right=8, globals_=1, kind="all"),
        # tiles of keys that all queries of a block see
        case_of(1, 1, 200, 8, 8, left=100, right=100, kind="few"),
        case_of(1, 1, 200, 8, 8, left=100, right=100, globals_=1, bias=1, kind="few"),
        *with_peaks(case_of(1, 1, 140, 8, 8, left=70, right=70, globals_=1)),
    ),
    cases=(
        *in_all_types(
            case_of(3, 2, 63, 3, 17, left=4, right=9, bias=1),
            case_of(2, 2, 300, 64, 64, left=64, right=64, globals_=1),
            case_of(2, 2, 70, 16, 8, left=100, right=100, block=7, globals_=1, bias=1),  # the band covers the sequence
            case_of(2, 1, 150, 40, 24, left=32, block=32, causal=1, globals_=1),
            case_of(2, 1, 50, 8, 8, left=0, right=0, globals_=1),
        ),
        # more than 64 global tokens, each in slices of its keys; and one that sees no key of the second slice
        case_of(1, 1, 900, 4, 4, left=1, causal=1, globals_=1, kind="many"),
        case_of(1, 1, 300, 4, 4, left=1, causal=1, globals_=1, kind="few"),
        case_of(1, 1, 4200, 1, 1, left=1, right=2, globals_=1, kind="ends"),  # more tokens than one scan
        *in_all_types(case_of(2, 2, 90, 8, 8, left=11, right=0, globals_=1, bias=1)),
    ),
    larger=in_all_types(
        case_of(2, 2, 1000, 64, 64, left=128, right=128, globals_=1),
        case_of(2, 2, 777, 33, 65, left=64, right=64, block=64, globals_=1, bias=1),
        case_of(1, 2, 1025, 40, 24, left=255, causal=1),
        *with_peaks(case_of(1, 2, 2500, 40, 24, left=100, right=100, globals_=1)),
    ),
    empty=EMPTY,
    body_refuses=EMPTY,
    unlaunched=EMPTY,
    hidden={"k": (1e4,), "v": (1e4,), "k_global": (1e4,), "v_global": (1e4,)},
    averaged=("v", lambda heads, channels: case_of(1, heads, 2, 8, channels, left=1, right=1, kind="mean")),
    cuda_roundings=1,  # of weights
    per_node=("scale", "left", "right"),
    wrong_attributes=tuple(
        ({"scale": 0.5, "left": 1, "right": 1} | changed, words)
        for changed, words in (
            ({"scale": float("inf")}, "scale is inf"),
            ({"left": -1}, "left is -1"),
            ({"right": 2**62}, "right is"),
            ({"block": 0}, "block is 0"),
        )
    ),
    wrong_sizes=({"bias": (2, 3)},),
    uncountable=(
        *(tuple(2**31 if i == place else 1 for i in range(12)) for place in range(8)),
        (2**16, 2**15, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1),  # heads of all samples
    ),
    baselines=baselines,
    work=work,
    raced=in_all_types(
        case_of(3, 1, 150, 72, 40, left=40, right=40, globals_=1, bias=1),
        case_of(2, 1, 200, 16, 65, left=64, causal=1, globals_=1),
    ),
    checked=in_all_types(
        case_of(2, 3, 630, 24, 40, left=70, right=30, globals_=1, bias=1),
        case_of(1, 2, 1000, 100, 100, left=64, right=64, block=64, globals_=1),
        case_of(3, 1, 4099, 64, 64, left=256, right=256, globals_=1, kind="few"),
        case_of(2, 8, 2048, 64, 64, left=512, causal=1),
        *with_peaks(case_of(2, 2, 4000, 64, 64, left=256, right=256, globals_=1)),
    ),
    timed=(timed("float16", 4096), timed("float16", 32768), timed("float32", 4096)),
    # q and out: 65,600 · 8 · 64 · 64 elements each
    huge=(replace(case_of(65_600, 8, 64, 64, 64, left=16, right=16), dtype="float16"),),
    compared=9,
)
