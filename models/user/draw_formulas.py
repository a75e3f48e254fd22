"""PyTorch's functions that draw random numbers of a distribution that depends on their input, as formulas of the input
and of numbers that do not: these can be drawn once, and each input then has the answer that belongs to them.

Each function gets `draw`, see `Draw`, and the function of PyTorch that was called with the other arguments. Those whose
name ends in _ write to their input.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.user.torch_functions import written_out

# The value of SELU far below 0, which alpha dropout puts in the place of what it drops.
SELU_LOWEST = -1.7580993408473766


class Draw(Protocol):
    """Gives what a function of sizes and limits alone returns. filled: the tensor that it writes to, if any."""

    def __call__(self, func: Any, args: Any, kwargs: Any, filled: Tensor | None = None) -> Tensor: ...


def dropout(draw: Draw, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    """Of every kind. input: [batch, channels, …] where whole channels are dropped."""
    name = func.__name__
    if not train or p == 0:
        return func(input, p, train)  # type: ignore[no-any-return]
    sizes = [size if axis < 2 or "feature" not in name else 1 for axis, size in enumerate(input.shape)]
    scales = draw(torch.dropout, (torch.ones(sizes, dtype=input.dtype), p, True), {})
    if "alpha" in name and p < 1:
        keeps = (scales != 0).to(input.dtype)
        size = ((SELU_LOWEST**2 * p + 1) * (1 - p)) ** -0.5
        result = (input * keeps + SELU_LOWEST * (1 - keeps) - SELU_LOWEST * p) * size
    else:
        result = input * scales
    return written(result, input if name.endswith("_") else None)


def normal(
    draw: Draw, func: Any, mean: Any, std: Any = 1.0, *args: Any, out: Tensor | None = None, **kwargs: Any
) -> Tensor:
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    if not given:
        return written(draw(func, (mean, std, *args), kwargs), out)
    shape = torch.broadcast_shapes(*(x.shape for x in given))
    return written(mean + std * draw(torch.randn, (shape,), {**kwargs, "dtype": given[0].dtype}), out)


def bernoulli(
    draw: Draw, func: Any, input: Tensor, p: Any = None, *, out: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Of the probabilities `input`; or in the shape of it, of `p`."""
    in_place = func.__name__.endswith("_")
    chances = input if p is None and not in_place else 0.5 if p is None else p
    if not isinstance(chances, Tensor):
        return written(draw(func, (input, chances), kwargs, input if in_place else None), out)
    ones = (draw(torch.rand, (input.shape,), kwargs) < chances).to(input.dtype)
    return written(ones, input if in_place else out)


def multinomial(
    draw: Draw,
    func: Any,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """input [..., choices]: weights. As PyTorch does it, the largest of weights divided by exponential numbers."""
    repeats = (num_samples,) if replacement and num_samples > 1 else ()
    noise = torch.empty(*input.shape[:-1], *repeats, input.shape[-1])
    noise = draw(Tensor.exponential_, (noise,), kwargs, noise)
    if repeats:
        return written((input.unsqueeze(-2) / noise).argmax(-1), out)
    return written((input / noise).topk(num_samples, -1).indices, out)


def rrelu(
    draw: Draw,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    **kwargs: Any,
) -> Tensor:
    if not training:
        return func(input, lower, upper, training)  # type: ignore[no-any-return]
    slopes = torch.empty(input.shape)
    slopes = draw(Tensor.uniform_, (slopes, lower, upper), kwargs, slopes).to(input.dtype)
    return written(torch.where(input >= 0, input, input * slopes), input if func is torch.rrelu_ else None)


def attention(
    draw: Draw,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The arguments of F.scaled_dot_product_attention, whose weights are what it makes of unit vectors as values."""
    if dropout_p == 0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, 0.0, is_causal, **options)  # type: ignore[no-any-return]
    units = torch.eye(key.shape[-2], dtype=value.dtype).expand(*value.shape[:-1], -1)
    weights = written_out(query, key, units, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return dropout(draw, torch.dropout, weights, dropout_p, True) @ value


def written(result: Tensor, target: Tensor | None) -> Tensor:
    return result if target is None else target.copy_(result)


FORMULAS: dict[Any, Any] = {
    torch.dropout: dropout,
    torch.dropout_: dropout,
    torch.feature_dropout: dropout,
    torch.feature_dropout_: dropout,
    torch.alpha_dropout: dropout,
    torch.alpha_dropout_: dropout,
    torch.feature_alpha_dropout: dropout,
    torch.feature_alpha_dropout_: dropout,
    torch.normal: normal,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: bernoulli,
    torch.multinomial: multinomial,
    Tensor.multinomial: multinomial,
    torch.rrelu: rrelu,
    torch.rrelu_: rrelu,
    F.scaled_dot_product_attention: attention,
}
