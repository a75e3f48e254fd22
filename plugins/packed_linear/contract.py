"""The contract of PackedLinear."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from effexport.plugins.contract import Case, Contract, Limit
from effexport.plugins.linear_layers import activated_exactly, linear_cases
from effexport.plugins.packed_linear import SIGNATURE


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Kind "halfway": every number of x lies in the middle between two of bfloat16. "small": products of about 1e-30,
    above the 1e-38 below which instructions for bfloat16 have zeros. "large": values of about 100, where activations
    have reached their limits. "silent": x and bias of −0, so that the residual comes out.
    """
    batch, seq, width, outputs, samples, tokens, _ = case.sizes
    source = case.generator(device)
    x, residual = case.normal(source, batch, seq, width), case.normal(source, samples, tokens, outputs)
    weight = (replace(case, dtype="float32").normal(source, width, outputs) / max(width, 1) ** 0.5).bfloat16()
    bias = replace(case, dtype="float32").normal(source, outputs)
    if case.kind == "halfway":
        x = (x.bfloat16().float().view(torch.int32) | 0x8000).view(torch.float32).to(x.dtype)
    elif case.kind == "small":
        x, bias, residual = x * 1e-30, bias * 0, residual * 0
    elif case.kind == "large":
        x = x * 100
    elif case.kind == "silent":
        x, bias = x * 0 - 0.0, bias * 0 - 0.0
    return {"x": x, "weight": weight, "bias": bias, "residual": residual}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formula in float64, with x rounded to bfloat16."""
    x, weight, bias, residual = inputs.values()
    z = torch.einsum("bsi,io->bso", x.bfloat16().double(), weight.double()) + bias.double()
    return {"y": activated_exactly(z, case.sizes[-1]) + residual.double()}


def limit(case: Case) -> Limit:
    reason = (
        "sums of products in float32, in any order: roundings of 6e-8 that add up like a random walk, with 4 times its "
        "width; an activation within 4e-7; and one rounding of the result"
    )
    return Limit(4 * 6e-8 * (case.sizes[2] + 4) ** 0.5 + 4e-7 + case.rounding, reason)


cases_of = partial(linear_cases, dtypes=("float32", "bfloat16"))

CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch seq inputs outputs samples tokens activation",
    inputs=inputs,
    exact=exact,
    limit=limit,
    small=cases_of((2, 3, 1, 1), (1, 7, 33, 5), (2, 5, 16, 17), (1, 1, 40, 70)),
    # tiles have 6 rows and up to 64 columns, blocks 48 or 96 rows and 64 or 512 columns
    cases=(
        *cases_of((1, 12, 64, 64), (1, 5, 31, 3), (2, 13, 130, 65), (3, 1, 7, 129), (2, 50, 34, 1), (1, 97, 513, 40)),
        *cases_of((2, 4, 48, 20), kind="halfway"),
        *cases_of((2, 9, 33, 66), (1, 3, 64, 16), kind="large"),
        *cases_of((2, 9, 33, 66), kind="silent"),
        Case((2, 4, 48, 20, 1, 1, 0), kind="small"),
    ),
    larger=cases_of((1, 1, 1024, 1000), (2, 300, 96, 530), (1, 7, 4099, 80)),
    empty=tuple(Case((*sizes, 1, 1, 0)) for sizes in ((0, 5, 8, 4), (2, 0, 8, 4), (2, 5, 0, 4), (2, 5, 8, 0))),
    shared=("weight", "bias"),
    per_node=("activation", "round_output"),
    wrong_attributes=(
        ({"round_output": 2}, "round_output is 2"),
        ({"activation": 5}, "activation is 5"),
        ({"activation": -1}, "activation is -1"),
        ({"activation": [3]}, "activation is a list"),
    ),
    wrong_sizes=({"residual": (2, 1, 20)}, {"residual": (1, 4, 20)}, {"bias": (1,)}, {"weight": (20, 48)}),
)
