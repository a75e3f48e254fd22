"""The contract of MaskedAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import (
    PEAK_LOGIT,
    PEAKS,
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
from effexport.plugins.masked_attention import SIGNATURE, op


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Kind "random": some keys are hidden, and all keys of the last of several samples. Kind "visible": none.

    PEAKS: the logits of a key are far above all others, and all are exact.
    """
    batch, heads, n, m, d, e = case.sizes
    source = case.generator(device)
    q, k, v = (case.normal(source, batch, heads, *shape) for shape in ((n, d), (m, d), (m, e)))
    keep = random_mask(source, batch, m)
    if case.kind in PEAKS:
        highest = peak(case.kind, m)
        q[..., 0], k[..., 0] = PEAK_LOGIT / 8, 0
        k[:, :, highest] = 0
        k[:, :, highest, 0] = 8 / case.numbers[0]
        keep[:, highest] = True
    if case.kind == "mean":
        q = torch.zeros_like(q)
    if case.kind in ("visible", "mean"):
        keep = torch.ones_like(keep)
    elif batch > 1:
        keep[-1] = False
    return {"q": q, "k": k, "v": v, "keep": keep}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A softmax over the visible keys, in float64; where there is none, the mean of all values."""
    *tensors, keep = inputs.values()
    q, k, v = (x.double() for x in tensors)
    logits = case.numbers[0] * q @ k.transpose(-1, -2)
    sees = keep.any(dim=1, keepdim=True)
    seen = torch.where(sees[:, None, None], logits, 0).masked_fill((sees & ~keep)[:, None, None], -torch.inf)
    return {"out": seen.softmax(dim=-1) @ v}


def intermediate(case: Case) -> int:
    """The logits."""
    _, heads, n, m, _, _ = case.sizes
    return heads * n * m


def limit(case: Case) -> Limit:
    # float32 weights are not rounded: one of its roundings more makes no difference to 2e-5
    reason = "2e-5 for values of about 1, and in half types one rounding of weights and one of results"
    return Limit(2e-5 + 2 * case.rounding, reason)


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
    fragments = 1 if case.dtype == "float32" else 2
    slice_length = 4 * 64 * parts(n, 64)
    slices = parts(m, slice_length)
    blocks = batch * heads * slices * parts(n, 64 * fragments) * parts(e, 64)
    tiles = parts(min(m, slice_length), keys)
    masked = 0 if case.kind == "visible" and m % keys == 0 else None
    queries = min(n, 64 * fragments)
    core = attention_core(size, blocks, tiles, d, queries=queries, fragments=fragments, masked=masked)
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


EMPTY = ((0, 2, 3, 4, 40, 24), (2, 0, 3, 4, 40, 24), (2, 2, 0, 4, 40, 24))

CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads n m d e",
    numbers="scale",
    inputs=inputs,
    exact=exact,
    limit=limit,
    intermediate=intermediate,
    small=in_all_types(
        Case((1, 1, 1, 1, 1, 1), (0.5,)),
        Case((1, 1, 3, 0, 8, 8), (0.5,)),  # without keys: zeros
        Case((2, 2, 5, 70, 24, 40), (0.2,)),
        Case((1, 2, 20, 130, 64, 64), (0.125,), "visible"),
        *with_peaks(Case((1, 1, 3, 600, 8, 8), (0.5,))),  # slices of 256 keys
        *with_peaks(Case((1, 1, 70, 130, 8, 8), (0.5,))),  # tiles of 32 or 64 keys
        *with_peaks(Case((1, 1, 1, 8500, 4, 4), (0.5,))),  # more slices than a warp has lanes
    ),
    cases=in_all_types(
        Case((3, 2, 5, 63, 3, 17), (0.37,)),
        Case((2, 2, 70, 130, 64, 64), (0.125,)),
        Case((3, 2, 17, 65, 100, 136), (0.1,)),
        Case((2, 2, 17, 65, 34, 38), (0.2,)),  # in half types, rows begin at multiples of 4 bytes
        Case((3, 2, 3, 600, 64, 64), (0.125,)),
        Case((2, 2, 5, 70, 16, 8), (-0.37,)),
        Case((2, 2, 5, 70, 16, 8), (0.0,)),
    ),
    larger=in_all_types(
        Case((3, 2, 100, 1000, 40, 24), (0.37,)),
        Case((3, 2, 1000, 100, 40, 24), (0.16,)),
        Case((3, 2, 257, 1025, 63, 33), (0.37,)),  # more than one block of queries and of keys
        *with_peaks(Case((1, 2, 3, 2500, 40, 24), (0.5,))),  # slices of 1024 keys
    ),
    empty=tuple(Case(sizes, (0.37,)) for sizes in EMPTY),
    body_refuses=(Case((2, 0, 3, 4, 40, 24), (0.37,)),),
    unlaunched=tuple(Case(sizes, (0.37,)) for sizes in EMPTY),
    hidden={"k": (1e4,), "v": (1e4,)},
    averaged=("v", lambda heads, channels: Case((1, heads, 2, 2, 8, channels), (0.5,), "mean")),
    cuda_roundings=1,  # of weights
    per_node=("scale",),
    wrong_attributes=(
        ({}, "scale is missing"),
        ({"scale": "1"}, "scale has another type"),
        ({"scale": 1}, "scale has another type"),
        ({"scale": float("inf")}, "scale is inf"),
    ),
    uncountable=(
        *(tuple(2**31 if i == place else 1 for i in range(6)) for place in range(6)),
        (2**16, 1, 2**15, 1, 1, 1),  # queries of all groups
        (1, 1, 2**30, 1, 1, 2**14),  # blocks
        (2**31 - 1,) * 6,
    ),
    baselines=baselines,
    work=work,
    raced=in_all_types(Case((3, 1, 20, 70, 72, 40), (0.2,)), Case((3, 1, 3, 300, 16, 65), (0.2,))),
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
