"""The contract of AFTWindowAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.aft_window_attention import SIGNATURE
from effexport.plugins.contract import (
    COLUMNS,
    PEAK_LOGIT,
    AtMost,
    Case,
    Contract,
    FasterThan,
    Limit,
    Timed,
    Work,
    accesses,
    in_all_types,
    moved,
    parts,
    peak,
    product,
    random_mask,
    with_peaks,
)

# Elements of the weights that are made at a time for one sample: [heads, queries, seq, channels].
WEIGHTS = 1 << 25
BLOCK = 64


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A third of the tokens is padding that holds NaN. Kind "no token": all of the last sample is padding. Kind
    "visible": none is, because kernels do not read padding.

    PEAKS: a key is far above all others. Kind "spread": keys and biases differ more. Kind "own bias": that of a query's
    own token is far above all others, and all tokens are visible, because the contract leaves open what a query without
    such a key gets.
    """
    batch, heads, seq, channels, key_channels, bias_heads, positions, taps, causal = case.sizes
    source = case.generator(device)
    q, v = (case.normal(source, batch, heads, seq, channels) for _ in range(2))
    k = case.normal(source, batch, heads, seq, key_channels)
    keep = random_mask(source, batch, seq)
    bias = torch.randn(bias_heads, positions, taps, generator=source, device=device)
    if case.kind == "no token":
        keep[-1] = False
    elif case.kind == "spread":
        k.mul_(3)
        bias.mul_(2)
    highest = peak(case.kind, seq)
    k[:, :, highest], keep[:, highest] = PEAK_LOGIT, True
    if case.kind in ("own bias", "visible", "mean"):
        keep[:] = True
    if case.kind == "mean":
        q, k, bias = torch.full_like(q, 1000), torch.zeros_like(k), torch.zeros_like(bias)
    if case.kind == "own bias":
        bias[..., taps - 1 if causal else taps // 2] = PEAK_LOGIT
    hidden = ~keep[:, None, :, None]
    return {
        "q": q,
        "k": k.masked_fill_(hidden, torch.nan),
        "v": v.masked_fill_(hidden, torch.nan),
        "keep": keep,
        "bias": bias,
    }


def both_forms(*cases: Case) -> tuple[Case, ...]:
    """The cases, and their causal forms."""
    return tuple(replace(case, sizes=(*case.sizes[:-1], causal)) for causal in (0, 1) for case in cases)


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """σ(q_t) Σ e^(k + w_t) v / Σ e^(k + w_t) over the visible tokens, in float64, some queries at a time."""
    q, k, v, keep, bias = inputs.values()
    seq, taps, causal = case.sizes[2], case.sizes[7], bool(case.sizes[8])
    place = torch.arange(seq, device=q.device)
    tap = place - place[:, None] + (taps - 1 if causal else taps // 2)
    own = bias[:, :seq].double().expand(-1, seq, -1)
    w = own.gather(2, tap.clamp(0, taps - 1).expand(len(bias), -1, -1))
    w = w.masked_fill((tap < 0) | (tap >= taps), 0)
    if causal:
        w = w.masked_fill(place > place[:, None], -torch.inf)
    hidden = ~keep[:, None, None, :, None]
    key, value = (x.double()[:, :, None].masked_fill(hidden, filled) for x, filled in ((k, -torch.inf), (v, 0)))
    rows = []
    for some in w[..., None].split(queries_at_once(case), dim=1):
        weights = torch.softmax(key + some, dim=3).nan_to_num_(0)
        rows.append((weights * value).sum(dim=3))
    return {"out": torch.sigmoid(q.double()) * torch.cat(rows, dim=2)}


def queries_at_once(case: Case) -> int:
    _, heads, seq, channels, *_ = case.sizes
    return min(seq, max(1, WEIGHTS // (heads * seq * channels)))


def intermediate(case: Case) -> int:
    _, heads, seq, channels, *_ = case.sizes
    return heads * queries_at_once(case) * seq * channels


def limit(case: Case) -> Limit:
    blocks = -(-case.sizes[2] // 32)
    reason = (
        "the contract's 5e-6: 32 keys of a block and those of a product are added up, one after another, and 2^x is "
        "off by 2^-22; on tensor cores, numbers of a tile whose weights differ by up to 2^14 are off by 2^-20 in sum, "
        "products of halves by 3 * 2^-22, and sums of 16, rounded towards zero, by 17 * 2^-24; "
        "one rounding of float32 for a tenth of the blocks of 32 tokens; and one of the result"
    )
    return Limit(5e-6 + blocks / 10 * 2**-24 + case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The function body's way in float32, not causal: products of blocks of 64 tokens with their neighbours, and sums
    of the others. The weights are given, as they depend on parameters only."""
    q, k, v, keep, bias = inputs.values()
    seq, taps = case.sizes[2], case.sizes[7]
    if case.sizes[8] or taps // 2 > BLOCK:
        return {}
    blocks = -(-seq // BLOCK)
    tap = torch.arange(3 * BLOCK, device=q.device) - BLOCK - torch.arange(BLOCK, device=q.device)[:, None] + taps // 2
    near = (tap >= 0) & (tap < taps)
    padded = F.pad(bias.expand(-1, seq, -1) if bias.shape[1] == 1 else bias[:, :seq], (0, 0, 0, blocks * BLOCK - seq))
    index = tap.clamp(0, taps - 1).expand(len(bias), blocks, -1, -1)
    w = torch.where(near, padded.unflatten(1, (blocks, BLOCK)).gather(3, index), 0).exp()
    number = torch.arange(blocks, device=q.device)
    is_far = ((number[:, None] - number).abs() > 1).float()

    def blocked() -> Tensor:
        visible = keep[:, None, :, None]
        key = torch.where(visible, k.float(), -1e30)
        weight = torch.exp(key - key.amax(dim=2, keepdim=True).clamp(min=-1e29))
        columns = torch.cat([weight * torch.where(visible, v.float(), 0), weight], dim=3)
        around = F.pad(columns, (0, 0, BLOCK, 2 * BLOCK + blocks * BLOCK - seq)).unflatten(2, (-1, BLOCK))
        windows = torch.cat([around[:, :, i : i + blocks] for i in range(3)], dim=3)
        far = is_far @ around[:, :, 1 : blocks + 1].sum(dim=3)
        sums = (w @ windows + far[:, :, :, None]).flatten(2, 3)[:, :, :seq]
        n, d = sums[..., : v.shape[3]], sums[..., v.shape[3] :]
        context: Tensor = n / torch.where(d == 0, 1, d)
        return (torch.sigmoid(q.float()) * context).to(v.dtype)

    return {"blocked": blocked}


REPLACED = FasterThan("blocked", "the same sums in standard operators")
LOCAL = (1, 1, 8192, 512, 512, 1, 8192, 63)
CONV = (1, 8, 8192, 64, 1, 8, 1, 11)


def work(case: Case) -> Work:
    """Sums of blocks of 32 tokens and of runs of 8 blocks; those before and after each window; then windows of queries
    and 32 channels, whose weights and columns are made in shared memory for each block of keys."""
    batch, heads, seq, channels, key_channels, _, _, taps, causal = case.sizes
    queries, directions, reach = (32, 1, taps - 1) if causal else (64, 2, taps // 2)
    panels = batch * heads * parts(channels, 32)
    windows = panels * parts(seq, queries)
    # blocks of keys of all windows: of a causal one, those before its own
    near = 0
    for first in range(0, seq, queries):
        last = first // 32 if causal else parts(min(seq, min(seq, first + queries) + reach), 32)
        near += panels * (last - max(0, first - reach) // 32)
    warps = queries // 16
    # halves of weights, two at a time, with the largest bias; of columns, one at a time; largest numbers of each warp
    made = accesses(1.5 * queries + 4 * 32 + warps * (warps + 2))
    # three products of halves, of which one is read twice; and the factors of their columns
    halves = product(2, queries, 64, 32)
    products = halves * 2 + Work(tensor=halves.tensor) + accesses(2 + warps * 2 * 64 / COLUMNS)
    products = (made + products) * near + moved(2 * 4 * queries * 64) * windows
    blocks = parts(seq, 32)
    runs = parts(blocks, 8)
    # a table of eight warps' sums for each run; then two, from which each warp reads seven on average, either way
    tables = moved(12 * 32 * 8 * 2) * (panels * runs) + moved(12 * 32 * 8 * (2 + 7 * directions)) * (
        panels * min(runs, 8)
    )
    # three numbers for each row and channel
    sums, of_runs, others = (
        12.0 * batch * heads * rows * channels for rows in (blocks, runs, directions * parts(seq, queries))
    )
    keys_and_values = batch * heads * seq * (channels + key_channels) * case.torch_dtype.itemsize + batch * seq
    # of the sums of blocks, the third launch reads the maxima
    again = (sums + of_runs, keys_and_values + others + sums / 3)
    return products + tables + Work(scratch=sums + of_runs + others, again=again)


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads seq channels key_channels bias_heads positions taps causal",
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=in_all_types(Case((2, 2, 70, 33, 1, 2, 1, 40, 1)), Case((2, 2, 70, 33, 33, 1, 70, 7, 0))),
    small=in_all_types(
        Case((2, 1, 1, 1, 1, 1, 1, 1, 0)),
        Case((2, 2, 70, 9, 1, 2, 1, 11, 0), kind="no token"),
        Case((1, 1, 100, 33, 33, 1, 120, 7, 1)),
        # the middle is in the second of the four blocks of keys of 64 queries
        *with_peaks(Case((1, 1, 150, 8, 8, 1, 1, 7, 0))),
        *with_peaks(Case((1, 1, 150, 8, 8, 1, 1, 7, 1))),
        *(Case((1, 1, 130, 8, 8, 1, 1, taps, causal), kind="own bias") for taps in (1, 101) for causal in (0, 1)),
    ),
    # the kernels' sizes are 32, 64 and 192 tokens, 6 queries, 16 and 64 channels; the body's 32, or 8 and 64 tokens
    cases=both_forms(
        *in_all_types(
            Case((2, 2, 100, 20, 1, 2, 1, 9, 0), kind="spread"),
            Case((3, 2, 140, 35, 1, 2, 1, 11, 0), kind="no token"),
        ),
        *(
            Case((*sizes, 0), kind="spread")
            for sizes in (
                *((2, 1, 1, 1, 1, 1, 1, 1), (1, 1, 130, 40, 40, 1, 150, 63), (1, 1, 300, 5, 5, 1, 300, 7)),
                # nine runs of blocks, so parts of two runs, a last one of one; and windows that reach into other parts
                *((2, 2, 65, 8, 1, 2, 1, 201), (1, 1, 2200, 3, 3, 1, 1, 601)),
            )
        ),
    ),
    larger=both_forms(
        *in_all_types(Case((3, 2, 500, 70, 1, 2, 1, 21, 0), kind="no token")),
        *(
            Case((*sizes, 0), kind="spread")
            for sizes in (
                *((1, 2, 400, 20, 1, 2, 1, 11), (1, 1, 300, 100, 100, 1, 320, 63), (2, 1, 63, 17, 17, 1, 63, 5)),
                *((1, 2, 100, 9, 9, 1, 100, 301), (1, 2, 193, 65, 1, 2, 1, 3), (1, 1, 1000, 8, 8, 1, 1, 131)),
            )
        ),
    ),
    empty=both_forms(
        *(Case((*sizes, 1, 1, 4, 3, 0)) for sizes in ((0, 1, 4, 8), (2, 1, 0, 8), (2, 1, 4, 0), (2, 0, 4, 8)))
    ),
    hidden=dict.fromkeys("kv", (torch.nan, torch.inf, -torch.inf, 1e30)),
    averaged=("v", lambda heads, channels: Case((1, heads, 2, channels, channels, 1, 1, 1, 0), kind="mean")),
    wrong_sizes=(
        *({"bias": shape} for shape in ((3, 1, 201), (2, 64, 201), (2, 1, 0))),
        {"bias": (2, 1, 200), "causal": 0},
        {"k": (2, 2, 65, 2)},
    ),
    uncountable=((2**31, 1, 4, 8, 8, 1, 1, 3, 0), (1, 1, 2**31 - 4, 8, 8, 1, 1, 3, 1)),
    checked=in_all_types(
        *(Case((2, 1, 1000, 100, 100, 1, 1000, taps, causal)) for taps in (5, 63, 255) for causal in (0, 1)),
        *(Case((2, 3, 257, 64, 1, 3, 1, 11, causal)) for causal in (0, 1)),
        Case((1, 1, 63, 32, 32, 1, 1, 301, 0)),
        *(
            case
            for causal in (0, 1)
            for case in (
                *with_peaks(Case((2, 1, 3000, 100, 100, 1, 3000, 63, causal))),
                Case((2, 1, 1000, 100, 100, 1, 1000, 255, causal), kind="own bias"),
            )
        ),
    ),
    timed=(
        Timed(
            Case((*LOCAL, 0), (), "visible", "float16"),
            Case((1, 1, 70, 40, 40, 1, 70, 7, 0), (), "visible", "float16"),
            (AtMost(3.5, "three launches, the second of few blocks that wait for the first ones' sums"), REPLACED),
        ),
        Timed(
            Case((*CONV, 0), (), "visible", "float16"),
            Case((1, 2, 70, 8, 1, 2, 1, 5, 0), (), "visible", "float16"),
            (AtMost(4.5, "the same launches, with less to multiply"), REPLACED),
        ),
        Timed(Case((*LOCAL, 0), kind="visible"), Case((1, 1, 70, 40, 40, 1, 70, 7, 0), kind="visible"), (REPLACED,)),
    ),
    # q, k, v and out: 4200 · 1000 · 512 elements each
    huge=(Case((4200, 1, 1000, 512, 512, 1, 1, 5, 0), dtype="float16"),),
    intermediate=intermediate,
    shared=("bias",),
    # 10⁶ weights for every channel of each
    compared=36,
)
