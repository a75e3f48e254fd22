"""The contract of SegmentMeans."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.contract import (
    AtMost,
    Case,
    Contract,
    Limit,
    Timed,
    Work,
    in_all_types,
    moved,
    parts,
    token_mask,
)
from effexport.plugins.segment_means import SIGNATURE


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A tenth of the tokens, the second half of the second sample and the last quarter of the last are hidden: NaN.

    Kind "no token": all of the last sample is hidden. Kind "visible": no token is, because kernels do not read those.
    """
    batch, heads, seq, channels, _ = case.sizes
    source = case.generator(device)
    x = case.normal(source, batch, heads, seq, channels)
    keep = token_mask(source, batch, seq)
    keep[1:2, seq // 2 :] = False
    if case.kind == "no token":
        keep[-1] = False
    elif case.kind in ("visible", "mean"):
        keep[:] = True
    return {"x": x.masked_fill_(~keep[:, None, :, None], torch.nan), "keep": keep}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every token is added to its segment, in float64; 0 where a segment has no token."""
    batch, heads, seq, channels, segments = case.sizes
    x, keep = inputs.values()
    position = torch.arange(seq, device=x.device)
    length = F.pad((position + 1) * keep, (1, 0)).amax(dim=1, keepdim=True)
    owner = position // (-(-length // segments)).clamp(min=1)
    owner = torch.where(keep, owner, segments)[:, None, :, None]  # one more segment, for hidden tokens
    kept = torch.where(keep[:, None, :, None], x.double(), 0)
    sums = kept.new_zeros(batch, heads, segments + 1, channels).scatter_add_(2, owner.expand_as(kept), kept)
    counts = kept.new_zeros(batch, 1, segments + 1, 1).scatter_add_(2, owner, torch.ones_like(owner).double())
    return {"means": (sums / counts.clamp(min=1))[:, :, :segments]}


def limit(case: Case) -> Limit:
    reason = (
        "float32 sums of up to 1000 values of either sign, with roundings of 6e-8 each, which the division makes "
        "smaller; and one rounding of the result"
    )
    return Limit(1e-6 + case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """A mean over equal segments: nearly the same work without a mask, and so a lower bound for PyTorch."""
    x, segments = inputs["x"], case.sizes[-1]
    return {"mean": lambda: x.unflatten(2, (segments, -1)).mean(dim=3, dtype=torch.float32)}


def work(case: Case) -> Work:
    """An addition for each number; the sums of a block's threads meet in shared memory."""
    batch, heads, seq, channels, segments = case.sizes
    rows = 8 if case.dtype == "float32" else 16
    blocks = batch * heads * segments * parts(channels, 64)
    return Work(fused=float(batch * heads * seq * channels)) + moved(2 * 4 * rows * 64) * blocks


def timed(dtype: str, goal: AtMost) -> Timed:
    large, small = (Case(sizes, (), "visible", dtype) for sizes in ((8, 8, 8192, 64, 64), (1, 2, 64, 8, 4)))
    return Timed(large, small, (goal,))


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads seq channels num_segments",
    inputs=inputs,
    exact=exact,
    limit=limit,
    small=in_all_types(
        Case((2, 1, 1, 1, 1)),
        Case((2, 2, 5, 8, 16)),  # more segments than tokens
        Case((2, 3, 63, 33, 8), kind="no token"),
    ),
    cases=in_all_types(
        Case((3, 2, 5, 15, 1), kind="no token"),
        Case((3, 2, 64, 64, 16)),
        Case((3, 2, 300, 100, 7)),
        Case((3, 2, 65, 130, 16), kind="no token"),  # several blocks of channels
        Case((3, 2, 4500, 3, 2)),  # the end of a mask is searched in several steps
    ),
    larger=in_all_types(Case((3, 2, 1000, 24, 64)), Case((3, 2, 1000, 200, 1)), Case((3, 2, 80, 48, 16))),
    empty=tuple(Case(sizes) for sizes in ((2, 2, 0, 4, 5), (0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 3, 0, 5))),
    body_refuses=(Case((2, 0, 3, 4, 5)),),
    unlaunched=tuple(Case(sizes) for sizes in ((0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 3, 0, 5))),
    hidden={"x": (torch.nan, torch.inf, 1e30)},
    averaged=("x", lambda heads, channels: Case((1, heads, 2, channels, 1), kind="mean")),
    body_hides=False,  # it multiplies by zero
    wrong_attributes=(
        ({}, "attribute num_segments is missing"),
        ({"num_segments": 2.0}, "attribute num_segments has another type"),
        ({"num_segments": 0}, "num_segments is 0"),
        ({"num_segments": 2**40}, f"num_segments is {2**40}"),
    ),
    uncountable=((2**31, 1, 4, 8, 3), (1, 1, 2**31 - 1, 8, 3), (1, 1, 4, 8, 2**31), (2**30, 1, 4, 8, 2)),
    baselines=baselines,
    work=work,
    # without tokens, there is no barrier before the sums
    raced=in_all_types(Case((2, 1, 63, 33, 7)), Case((2, 1, 0, 8, 4)), Case((1, 1, 8300, 8, 3))),
    checked=in_all_types(
        Case((3, 2, 1000, 100, 7)), Case((2, 2, 100, 64, 64), kind="no token"), Case((8, 8, 8192, 64, 64))
    ),
    timed=(
        timed("float16", AtMost(1.6, "a block begins with the length of its sample")),
        timed("float32", AtMost(1.6, "as for float16")),
    ),
    # x and means: 4200 · 8 · 1000 · 64 elements each
    huge=(Case((4200, 8, 1000, 64, 1000), dtype="float16"),),
)
