"""The common part in PyTorch of operators that are linear layers: activations, and checks of arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.activations import ACTIVATIONS
from effexport.plugins.contract import Case

# By the value of the attribute.
ACTIVATED = (lambda z: z, F.gelu, lambda z: F.gelu(z, approximate="tanh"), F.relu, F.silu)


def finished(z: Tensor, residual: Tensor, activation: int, round_output: int) -> Tensor:
    """The activation, the residual and the rounding after a product and its bias, in the type of z."""
    y = ACTIVATED[activation](z) + residual
    return y.bfloat16().to(y.dtype) if round_output else y


def check_tail(op: str, x: Tensor, weight: Tensor, residual: Tensor, activation: int, round_output: int) -> None:
    """Raise ValueError for attributes or a residual that a signature allows and the operator does not."""
    if round_output not in (0, 1):
        raise ValueError(f"{op}: round_output is {round_output}; expected 0 or 1")
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(f"{op}: activation is {activation}; expected at least 0 and at most {len(ACTIVATIONS) - 1}")
    if residual.shape[:2] not in (x.shape[:2], (1, 1)):
        raise ValueError(
            f"{op}: residual has shape {tuple(residual.shape)}; expected {(*x.shape[:2], weight.shape[1])} or "
            f"{(1, 1, weight.shape[1])}"
        )


def linear_cases(
    *sizes: tuple[int, int, int, int], kind: str = "random", dtypes: tuple[str, ...] = ("float32",)
) -> tuple[Case, ...]:
    """Calls of contracts: with a residual for every row and one for all, each activation in turn, in these types."""
    return tuple(
        Case((*one, *(one[:2] if of_rows else (1, 1)), (i + of_rows) % len(ACTIVATIONS)), kind=kind, dtype=dtype)
        for i, one in enumerate(sizes)
        for of_rows in (1, 0)
        for dtype in dtypes
    )


def activated_exactly(z: Tensor, activation: int) -> Tensor:
    """The activation in float64, by its formula."""
    name = ACTIVATIONS[activation]
    if name == "gelu":
        return z * (1 + torch.erf(z / 2**0.5)) / 2
    if name == "gelu_tanh":
        return z / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    if name == "relu":
        return z.clamp(min=0)
    return z * z.sigmoid() if name == "silu" else z
