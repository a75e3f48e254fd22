"""What all implementations of SequenceConv promise. Sizes of a case: batch, heads, seq, channels, taps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.contract import (
    ROUNDING,
    Case,
    Contract,
    Limit,
    Output,
    generator,
    in_all_types,
    normal,
    token_mask,
)


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A tenth of the tokens and the last quarter of the last sample are hidden: NaN in x.

    Kind "no token": all of the last sample is hidden. Kind "visible": no token is, because kernels do not read those.
    """
    batch, heads, seq, channels, taps = case.sizes
    source = generator(case, device)
    x, residual = (normal(case, source, batch, heads, seq, channels) for _ in range(2))
    weight = normal(case, source, heads, 1, taps, 1) / taps**0.5
    keep = token_mask(source, batch, seq)
    if case.kind == "no token":
        keep[-1] = False
    elif case.kind == "visible":
        keep[:] = True
    x.masked_fill_(~keep[:, None, :, None], torch.nan)
    return {"x": x, "weight": weight, "keep": keep, "residual": residual}


def outputs(case: Case) -> dict[str, Output]:
    return {"out": Output(case.sizes[:4], case.torch_dtype)}


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
        "66 additions in float32 with a rounding of at most 6e-8 of the largest value each: 4e-6; and one rounding of "
        "the result"
    )
    return Limit(4e-6 + ROUNDING[case.dtype], reason)


CONTRACT = Contract(
    inputs=inputs,
    outputs=outputs,
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
    empty=tuple(Case(sizes) for sizes in ((2, 2, 0, 4, 5), (0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 3, 0, 5))),
    shared=("weight",),
    hidden={"x": (torch.nan, torch.inf, 1e30)},
    body_limit=2 * ROUNDING["float16"],  # the convolution, which may be larger than the result
    uncountable=((2**31, 1, 4, 8, 3), (1, 1, 2**31 - 1, 8, 3), (1, 1, 4, 8, 2**31 - 1), (2**30, 1, 4, 200, 3)),
)
