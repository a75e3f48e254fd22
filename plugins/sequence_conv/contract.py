"""The contract of SequenceConv."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.contract import (
    ROUNDING,
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
    product,
    token_mask,
)
from effexport.plugins.sequence_conv import SIGNATURE


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A tenth of the tokens and the last quarter of the last sample are hidden: NaN in x.

    Kind "no token": all of the last sample is hidden. Kind "visible": no token is, because kernels do not read those.
    """
    batch, heads, seq, channels, taps = case.sizes
    source = case.generator(device)
    x, residual = (case.normal(source, batch, heads, seq, channels) for _ in range(2))
    weight = case.normal(source, heads, 1, taps, 1) / taps**0.5
    keep = token_mask(source, batch, seq)
    if case.kind == "no token":
        keep[-1] = False
    elif case.kind == "visible":
        keep[:] = True
    x.masked_fill_(~keep[:, None, :, None], torch.nan)
    return {"x": x, "weight": weight, "keep": keep, "residual": residual}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """residual[t] + Σ_j weight[j] x[t + j − (taps − 1) / 2] over kept tokens, in float64."""
    seq, taps = case.sizes[2], case.sizes[4]
    x, weight, keep, residual = inputs.values()
    padded = F.pad(torch.where(keep[:, None, :, None], x.double(), 0), (0, 0, taps // 2, taps // 2))
    total = residual.double()
    for j in range(taps):
        total = total + weight[:, :, j].double() * padded[:, :, j : j + seq]
    return {"out": total}


def limit(case: Case) -> Limit:
    reason = (
        "up to 202 additions in float32: roundings of at most 6e-8 of the largest value, of either sign, which add up "
        "like a random walk to 9e-7; and one rounding of the result"
    )
    return Limit(2e-6 + case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """PyTorch's counterpart: a depth-wise convolution of the masked values, and a sum."""
    x, weight, keep, residual = inputs.values()
    heads, taps = case.sizes[1], case.sizes[4]

    def convolution() -> Tensor:
        kept = torch.where(keep[:, None, :, None], x, 0)
        return residual + F.conv2d(kept, weight, padding=(taps // 2, 0), groups=heads)

    return {"conv2d": convolution}


def work(case: Case) -> Work:
    """A block has 64 tokens and 64 channels, and every warp multiplies the rows of x that its 16 tokens need."""
    batch, heads, seq, channels, taps = case.sizes
    size = case.torch_dtype.itemsize
    blocks = batch * heads * parts(seq, 64) * parts(channels, 64)
    staged = moved(parts(64 + taps - 1, 16) * 16 * 64 * size)
    if size == 2:
        rows = parts(16 + taps - 1, 16) * 16
        sums = product(size, 64, 64, rows, left="registers") + accesses(4 * rows / 8)
    else:  # 8 tokens of 4 channels per lane, by 16 bytes of a row and four times as many of the taps for 8 rows
        steps = parts(8 + taps - 1, 8)
        sums = Work(fused=64.0 * 64 * 8 * steps) + moved(4 * steps * 8 * 32 * 16) + accesses(4 * steps * 4)
    return (staged + sums + moved(2 * 64 * 64 * 4)) * blocks


def timed(dtype: str, *goals: AtMost | FasterThan) -> Timed:
    large, small = (Case(sizes, (), "visible", dtype) for sizes in ((1, 8, 8192, 64, 65), (1, 2, 64, 8, 9)))
    return Timed(large, small, goals)


REPLACED = FasterThan("conv2d", "PyTorch's own convolution and sum")

EMPTY = ((2, 2, 0, 4, 5), (0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 3, 0, 5))

CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads seq channels taps",
    inputs=inputs,
    exact=exact,
    limit=limit,
    small=in_all_types(
        Case((2, 2, 1, 1, 1)),
        Case((1, 1, 10, 8, 33)),  # a filter longer than the sequence
        Case((2, 2, 63, 33, 3)),
    ),
    cases=in_all_types(
        Case((3, 2, 1, 16, 65)),
        Case((3, 2, 64, 64, 65), kind="no token"),
        Case((3, 2, 130, 72, 63)),  # several blocks of tokens and of channels
        Case((3, 2, 17, 8, 201), kind="no token"),
        Case((3, 2, 70, 100, 129)),  # several windows of rows
    ),
    larger=in_all_types(
        Case((3, 2, 1000, 24, 65)), Case((3, 2, 1000, 24, 1)), Case((3, 2, 300, 48, 201)), Case((3, 2, 80, 130, 7))
    ),
    empty=tuple(Case(sizes) for sizes in EMPTY),
    body_refuses=(Case((2, 0, 3, 4, 5)),),
    unlaunched=tuple(Case(sizes) for sizes in EMPTY),
    shared=("weight",),
    hidden={"x": (torch.nan, torch.inf, 1e30)},
    body_limit=ROUNDING["float16"],  # of the convolution
    wrong_sizes=({"weight": (2, 1, 0, 1)}, {"weight": (2, 1, 4, 1)}),
    uncountable=((2**31, 1, 4, 8, 3), (1, 1, 2**31 - 1, 8, 3), (1, 1, 4, 8, 2**31 - 1), (2**30, 1, 4, 200, 3)),
    baselines=baselines,
    work=work,
    raced=in_all_types(Case((2, 1, 70, 40, 70))),
    checked=in_all_types(Case((2, 3, 1000, 24, 65)), Case((4, 8, 8192, 64, 65))),
    timed=(
        timed("float16", AtMost(2.7, "few blocks at a time, each of which loads before it multiplies"), REPLACED),
        timed("float32", REPLACED),
    ),
    # x, residual and out: 4200 · 8 · 1000 · 64 elements each
    huge=(Case((4200, 8, 1000, 64, 3), dtype="float16"),),
)
