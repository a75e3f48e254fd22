"""What all implementations of MaskedAttention promise. Sizes of a case: batch, heads, n, m, d, e; number: scale."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.plugins.contract import (
    PEAK_LOGIT,
    PEAKS,
    ROUNDING,
    Case,
    Contract,
    Limit,
    Output,
    generator,
    in_all_types,
    normal,
    peak,
    random_mask,
    with_peaks,
)


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
    return Limit(2e-5 + 2 * ROUNDING[case.dtype], reason)


CONTRACT = Contract(
    inputs=inputs,
    outputs=outputs,
    exact=exact,
    limit=limit,
    intermediate=intermediate,
    attributes=lambda case: {"scale": case.numbers[0]},
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
        Case((3, 2, 3, 600, 64, 64), (0.125,)),
        Case((2, 2, 5, 70, 16, 8), (-0.37,)),
        Case((2, 2, 5, 70, 16, 8), (0.0,)),
    ),
    larger=in_all_types(
        Case((3, 2, 100, 1000, 40, 24), (0.16,)),
        Case((3, 2, 1000, 100, 40, 24), (0.16,)),
        Case((3, 2, 257, 1025, 63, 33), (0.12,)),  # more than one block of queries and of keys
        *with_peaks(Case((1, 2, 3, 2500, 40, 24), (0.5,))),  # slices of 1024 keys
    ),
    empty=tuple(Case(sizes, (0.37,)) for sizes in ((0, 2, 3, 4, 40, 24), (2, 0, 3, 4, 40, 24), (2, 2, 0, 4, 40, 24))),
    hidden={"k": (1e4,), "v": (1e4,)},
    body_limit=2**-7,  # logits of up to about 16 are rounded to 11 bits
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
)
