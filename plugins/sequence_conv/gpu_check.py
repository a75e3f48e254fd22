"""What scripts/gpu checks and times of SequenceConv. Sizes of a case: batch, heads, seq, channels, taps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.contract import Case, in_all_types
from effexport.plugins.gpu_check import AtMost, FasterThan, GpuCheck, Timed
from effexport.plugins.gpu_work import Work, accesses, moved, parts, product
from effexport.plugins.sequence_conv.contract import CONTRACT


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What PyTorch has for it: a depth-wise convolution of the masked values, and a sum."""
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


CHECK = GpuCheck(
    **vars(CONTRACT),
    baselines=baselines,
    work=work,
    checked=in_all_types(Case((2, 3, 1000, 24, 65)), Case((4, 8, 8192, 64, 65))),
    timed=(
        timed("float16", AtMost(2.7, "few blocks at a time, each of which loads before it multiplies"), REPLACED),
        timed("float32", REPLACED),
    ),
    # x, residual and out: 4200 · 8 · 1000 · 64 elements each
    huge=(Case((4200, 8, 1000, 64, 3), dtype="float16"),),
)
