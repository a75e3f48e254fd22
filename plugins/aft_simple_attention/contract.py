"""The contract of AFTSimpleAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.aft_simple_attention import SIGNATURE
from effexport.plugins.contract import (
    PEAK_LOGIT,
    AtMost,
    Case,
    Contract,
    Limit,
    Timed,
    Work,
    in_all_types,
    moved,
    parts,
    peak,
    random_mask,
    with_peaks,
)


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A third of the tokens is padding that holds NaN; none of kind "visible", because kernels do not read padding.

    Kind "far apart": weights differ by many powers of ten. Kind "no token": all of the last sample is padding. PEAKS:
    a key is far above all others.
    """
    batch, _, seq, _ = case.sizes
    source = case.generator(device)
    q, k, v = (case.normal(source, *case.sizes) for _ in range(3))
    if case.kind == "far apart":
        k.mul_(30)
    keep = random_mask(source, batch, seq)
    if case.kind == "no token":
        keep[-1] = False
    elif case.kind in ("visible", "mean"):
        keep[:] = True
    if case.kind == "mean":
        q, k = torch.full_like(q, 1000), torch.zeros_like(k)
    highest = peak(case.kind, seq)
    k[:, :, highest], keep[:, highest] = PEAK_LOGIT, True
    hidden = ~keep[:, None, :, None]
    return {"q": q, "k": k.masked_fill_(hidden, torch.nan), "v": v.masked_fill_(hidden, torch.nan), "keep": keep}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """σ(q) Σ e^(k − m) v / Σ e^(k − m) over the visible tokens of every sample, in float64; 0 where there are none."""
    q, k, v, keep = inputs.values()
    return {"out": formula(q.double(), k.double(), v.double(), keep)}


def formula(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """In standard operators, in the type of q: […, heads, seq, channels] and keep […, seq]."""
    visible = keep[..., None, :, None]
    keys = torch.where(visible, k, -1e30)
    weights = torch.exp(keys - keys.amax(dim=-2, keepdim=True)) * visible
    total = weights.sum(dim=-2, keepdim=True)
    context = (weights * torch.where(visible, v, 0)).sum(dim=-2, keepdim=True) / torch.where(total == 0, 1, total)
    return torch.sigmoid(q) * context


def limit(case: Case) -> Limit:
    slices = -(-case.sizes[2] // 256)
    reason = (
        "the contract's 4e-6 for 1000 tokens: up to 32 rows per thread and up to 16 threads are added up, one after "
        "another; one rounding of float32 for every slice of 256 tokens; and one of the result"
    )
    return Limit(4e-6 + slices * 2**-24 + case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The formula in standard operators, in float32."""
    q, k, v, keep = inputs.values()
    return {"formula": lambda: formula(q.float(), k.float(), v.float(), keep).to(v.dtype)}


def work(case: Case) -> Work:
    """A maximum and two sums of slices of 256 tokens, merged, and then the gates; exponentials do not count."""
    batch, heads, seq, channels = case.sizes
    columns, slices = batch * heads * channels, parts(seq, 256)
    partials, contexts = 12.0 * columns * slices, 4.0 * columns
    rows = 8 if case.dtype == "float32" else 16
    meeting = moved(2 * 12 * rows * 64) * (batch * heads * slices * parts(channels, 64))
    products = Work(fused=2.0 * columns * seq, scratch=partials + contexts, again=(partials, contexts))
    return products + meeting


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads seq channels",
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=in_all_types(Case((3, 1, 70, 33))),
    small=in_all_types(
        Case((2, 1, 1, 1)),
        Case((2, 1, 63, 63), kind="far apart"),
        Case((2, 3, 100, 33), kind="no token"),
        Case((1, 1, 520, 40)),
        *with_peaks(Case((1, 1, 520, 40))),
    ),
    cases=in_all_types(
        Case((2, 3, 1, 63)),
        Case((3, 1, 63, 15)),
        Case((2, 2, 257, 72), kind="far apart"),  # two tiles, in whole chunks
        Case((3, 2, 600, 70), kind="no token"),
        Case((2, 3, 100, 33), kind="far apart"),
    ),
    larger=in_all_types(
        *(Case((2, 1, seq, channels), kind="far apart") for seq in (1, 100, 1000) for channels in (17, 100, 512)),
        Case((3, 2, 1000, 70), kind="no token"),
    ),
    empty=tuple(Case(sizes) for sizes in ((0, 1, 4, 8), (2, 1, 0, 8), (2, 1, 4, 0), (2, 0, 4, 8))),
    averaged=("v", lambda heads, channels: Case((1, heads, 2, channels), kind="mean")),
    hidden=dict.fromkeys("kv", (torch.nan, torch.inf, -torch.inf, 1e30)),
    uncountable=((2**31, 1, 4, 8), (1, 1, 2**31, 8)),
    # a slice has 256 tokens, a tile 64 channels
    checked=in_all_types(
        *(Case(sizes, kind=kind) for sizes in ((1, 2, 257, 32), (2, 1, 1000, 100)) for kind in ("random", "far apart")),
        Case((8, 1, 8192, 512)),
        *with_peaks(Case((2, 1, 8192, 100))),
    ),
    timed=(
        Timed(
            Case((8, 1, 8192, 512), kind="visible", dtype="float16"),
            Case((1, 1, 63, 40), kind="visible", dtype="float16"),
            (AtMost(1.5, "exponential functions hide behind the loads"),),
        ),
        Timed(
            Case((8, 1, 8192, 512), kind="visible"),
            Case((1, 1, 63, 40), kind="visible"),
            (AtMost(1.5, "exponential functions hide behind the loads"),),
        ),
    ),
    # q, k, v and out: 4200 · 1000 · 512 elements each
    huge=(Case((4200, 1, 1000, 512), dtype="float16"),),
)
