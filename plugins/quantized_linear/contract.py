"""The contract of QuantizedLinear."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.plugins.contract import Case, Contract, Limit
from effexport.plugins.linear_layers import activated_exactly, linear_cases
from effexport.plugins.quantized_linear import MOST_INPUTS, SIGNATURE


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Kind "halfway": every number of x lies in the middle between two codes, of which the even one is taken.
    "extreme": codes of ±127 and weights of −128 to 127, which reach the largest sums, and overflow where two products
    are added in 16 bits. "rows": of zeros, of −0, of numbers below the least scale, and of single numbers far above the
    others. "large": values of about 100, where activations have reached their limits.
    """
    batch, seq, width, outputs, samples, tokens, _ = case.sizes
    source = case.generator(device)
    x, residual = case.normal(source, batch, seq, width), case.normal(source, samples, tokens, outputs)
    weight = torch.randint(-127, 128, (width, outputs), generator=source, device=device).to(torch.int8)
    scale = (torch.rand(outputs, generator=source, device=device) + 0.5) / (64 * max(width, 1) ** 0.5)
    bias = case.normal(source, outputs)
    if case.kind == "halfway":
        x = torch.randint(-126, 126, x.shape, generator=source, device=device) + 0.5
        x[..., 0] = 127
    elif case.kind == "extreme":
        x = x.sign()
        weight = torch.where(weight < -64, -128, 127).to(torch.int8)
    elif case.kind == "rows":
        factors = torch.tensor([0, -0.0, 1e-37, 1e-41, 1e30], device=device)
        x = x * factors.repeat(-(-seq // 5))[:seq, None]
        x[:, -1, 0] = 1e6
    elif case.kind == "large":
        x = x * 100
        scale = scale * 100
    return {"x": x, "weight": weight, "scale": scale, "bias": bias, "residual": residual}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formula in float64, with codes that are found as it says: in float32."""
    x, weight, scale, bias, residual = inputs.values()
    largest = torch.cat([x.abs(), x.new_full((*x.shape[:2], 1), 127 * torch.finfo(torch.float32).tiny)], -1).amax(-1)
    factor = torch.full_like(largest, 127).div(largest)[..., None]
    codes = (x * factor).double().round()
    sums = torch.einsum("bsi,io->bso", codes, weight.double())
    z = sums * scale.double() * (largest.double() / 127)[..., None] + bias.double()
    return {"y": activated_exactly(z, case.sizes[-1]) + residual.double()}


def limit(case: Case) -> Limit:
    reason = (
        "sums of codes are exact, and then become float32, are multiplied by both scales and get a bias and a "
        "residual: six roundings, also of the scale; an activation within 4e-7"
    )
    return Limit(6 * case.rounding + 4e-7, reason)


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch seq inputs outputs samples tokens activation",
    inputs=inputs,
    exact=exact,
    limit=limit,
    small=linear_cases((2, 3, 1, 1), (1, 7, 33, 5), (2, 5, 16, 17), (1, 1, 40, 70)),
    # tiles have 6 rows and up to 64 columns, blocks 48 or 96 rows and 64 or 512 columns; steps have 1, 2 or 4 numbers
    cases=(
        *linear_cases(
            (1, 12, 64, 64), (1, 5, 31, 3), (2, 13, 130, 65), (3, 1, 7, 129), (2, 50, 34, 1), (1, 97, 513, 40)
        ),
        *linear_cases((2, 5, 13, 9), (1, 3, 66, 20), kind="rows"),
        *linear_cases((2, 4, 48, 20), kind="halfway"),
        *linear_cases((2, 9, 35, 66), (1, 3, 64, 16), kind="large"),
        *linear_cases((2, 9, 35, 66), (1, 6, 64, 20), kind="extreme"),
        Case((2, 4, 48, 20, 1, 1, 0)),
    ),
    larger=(*linear_cases((1, 1, 1024, 1000), (2, 300, 96, 530)), *linear_cases((1, 7, 4099, 80), kind="extreme")),
    empty=tuple(Case((*sizes, 1, 1, 0)) for sizes in ((0, 5, 8, 4), (2, 0, 8, 4), (2, 5, 0, 4), (2, 5, 8, 0))),
    shared=("weight", "scale", "bias"),
    per_node=("activation", "round_output"),
    wrong_attributes=(
        ({"round_output": 2}, "round_output is 2"),
        ({"activation": 5}, "activation is 5"),
        ({"activation": -1}, "activation is -1"),
    ),
    wrong_sizes=(
        {"residual": (2, 1, 20)},
        {"residual": (1, 4, 20)},
        {"bias": (1,)},
        {"weight": (20, 48)},
        {"x": (2, 4, MOST_INPUTS + 1), "weight": (MOST_INPUTS + 1, 20)},
    ),
)
