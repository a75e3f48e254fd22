"""What scripts/gpu checks and times of MaskedAttention. Sizes of a case: batch, heads, n, m, d, e; number: scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import (
    Case,
    in_all_types,
    with_peaks,
)
from effexport.plugins.gpu_check import FasterThan, GpuCheck, Timed, sdpa_baselines
from effexport.plugins.gpu_work import Work, attention_core, parts
from effexport.plugins.masked_attention import op
from effexport.plugins.masked_attention.contract import CONTRACT


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The body's standard operators and, if no key is hidden, PyTorch's own attention."""
    q, k, v, keep = inputs.values()
    scale = case.numbers[0]

    def standard_operators() -> Tensor:
        logits = ((q * scale) @ k.transpose(-1, -2)).float()
        return torch.softmax(logits.masked_fill(~keep[:, None, None, :], op.HIDDEN_LOGIT), dim=-1).to(v.dtype) @ v

    fused = sdpa_baselines(q, k, v, scale) if case.kind == "visible" else {}
    return {"standard operators": standard_operators, **fused}


def work(case: Case) -> Work:
    """The core over slices of the keys; what slices give, highest, total and context of a query, is merged."""
    batch, heads, n, m, d, e = case.sizes
    size, keys = case.torch_dtype.itemsize, 32 if case.dtype == "float32" else 64
    query_tiles = parts(n, 64)
    slice_length = 4 * 64 * query_tiles
    slices = parts(m, slice_length)
    blocks = batch * heads * slices * query_tiles * parts(e, 64)
    core = attention_core(size, blocks, parts(min(m, slice_length), keys), d)
    if slices == 1:
        return core
    partials = 4.0 * batch * heads * slices * n * (2 + e)
    return core + Work(scratch=partials, again=(partials,))


def timed(small: tuple[int, ...], *sizes: int) -> tuple[Timed, ...]:
    """The case in float16 and float32, beside everything that could replace it."""
    body = FasterThan("standard operators", "in ONNX Runtime the kernel always replaces the body")
    efficient = FasterThan("SDPA memory-efficient", "PyTorch users have it in every type")
    flash = FasterThan("SDPA flash", "at most 1.5 times FlashAttention-2, which uses mma.sync too", times=0.67)
    return tuple(
        Timed(Case(sizes, (0.125,), "visible", dtype), Case(small, (0.125,), "visible", dtype), goals)
        for dtype, goals in (("float16", (body, efficient, flash)), ("float32", (body, efficient)))
    )


CHECK = GpuCheck(
    **vars(CONTRACT),
    baselines=baselines,
    work=work,
    checked=in_all_types(
        Case((2, 3, 63, 100, 24, 40), (0.2,)),
        Case((1, 2, 17, 1000, 100, 100), (0.1,)),
        Case((3, 1, 1, 4099, 64, 64), (0.125,)),
        Case((1, 2, 300, 500, 256, 256), (1 / 16,)),
        Case((2, 8, 64, 8192, 64, 64), (0.125,)),
        Case((2, 8, 8192, 64, 64, 64), (0.125,)),
        Case((2, 8, 2048, 2048, 64, 64), (0.125,)),
        *with_peaks(Case((2, 2, 3, 10_000, 64, 64), (0.125,))),
        *with_peaks(Case((2, 8, 2048, 2048, 64, 64), (0.125,))),
    ),
    timed=(
        *timed((1, 2, 8, 70, 64, 64), 1, 8, 64, 8192, 64, 64),
        *timed((1, 2, 70, 8, 64, 64), 1, 8, 8192, 64, 64, 64),
        *timed((1, 2, 64, 64, 64, 64), 1, 8, 8192, 8192, 64, 64),
    ),
    # queries and results: 64 · 524352 · 64 elements each
    huge=(Case((32, 2, 524_352, 3, 64, 64), (0.125,), "visible", "float16"),),
)
