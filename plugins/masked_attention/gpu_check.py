"""What scripts/gpu checks and times of MaskedAttention. Sizes of a case: batch, heads, n, m, d, e; number: scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import (
    PEAK_LOGIT,
    PEAKS,
    ROUNDING,
    Case,
    Limit,
    Output,
    generator,
    in_all_types,
    normal,
    peak,
    random_mask,
    with_peaks,
)
from effexport.plugins.gpu_check import FasterThan, GpuCheck, Timed, sdpa_baselines
from effexport.plugins.gpu_work import Work, attention_core, parts
from effexport.plugins.masked_attention import op


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Kind "random": some keys are hidden, and all keys of the last of several samples. Kind "visible": none.

    PEAKS: the logits of a key are far above all others, and all are exact.
    """
    batch, heads, n, m, d, e = case.sizes
    source = generator(case, device)
    q, k, v = (normal(case, source, batch, heads, *shape) for shape in ((n, d), (m, d), (m, e)))
    keep = random_mask(source, batch, m)
    if case.kind in PEAKS:
        highest = peak(case.kind, m)
        q[..., 0], k[..., 0] = PEAK_LOGIT / 8, 0
        k[:, :, highest] = 0
        k[:, :, highest, 0] = 8 / case.numbers[0]
        keep[:, highest] = True
    if case.kind == "visible":
        keep = torch.ones_like(keep)
    elif batch > 1:
        keep[-1] = False
    return {"q": q, "k": k, "v": v, "keep": keep}


def outputs(case: Case) -> dict[str, Output]:
    batch, heads, n, _, _, e = case.sizes
    return {"out": Output((batch, heads, n, e), case.torch_dtype)}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The operator's definition in float64."""
    q, k, v, keep = inputs.values()
    return {"out": op.reference(q.double(), k.double(), v.double(), keep, case.numbers[0])}


def intermediate(case: Case) -> int:
    """The logits."""
    _, heads, n, m, _, _ = case.sizes
    return heads * n * m


def limit(case: Case) -> Limit:
    # float32 weights are not rounded: one of its roundings more makes no difference to 2e-5
    reason = "the contract's 2e-5 for values of about 1, and in half types one rounding of weights and one of results"
    return Limit(2e-5 + 2 * ROUNDING[case.dtype], reason)


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
    inputs=inputs,
    outputs=outputs,
    reference=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    small=in_all_types(
        Case((1, 1, 1, 1, 1, 1), (0.5,)),
        Case((1, 1, 3, 0, 8, 8), (0.5,)),  # without keys: zeros
        Case((2, 2, 5, 70, 24, 40), (0.2,)),
        Case((1, 2, 20, 130, 64, 64), (0.125,), "visible"),
        *with_peaks(Case((1, 1, 3, 600, 8, 8), (0.5,))),  # slices of 256 keys
        *with_peaks(Case((1, 1, 70, 130, 8, 8), (0.5,))),  # tiles of 32 or 64 keys
        Case((1, 1, 1, 8500, 4, 4), (0.5,), "last"),  # more slices than a warp has lanes
    ),
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
    intermediate=intermediate,
)
