"""What scripts/gpu checks and times of SegmentMeans. Sizes of a case: batch, heads, seq, channels, segments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import Case, in_all_types
from effexport.plugins.gpu_check import AtMost, GpuCheck, Timed
from effexport.plugins.gpu_work import Work, moved, parts
from effexport.plugins.segment_means.contract import CONTRACT


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


CHECK = GpuCheck(
    **vars(CONTRACT),
    baselines=baselines,
    work=work,
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
