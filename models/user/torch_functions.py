"""What modes that see the functions of PyTorch have to know of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def is_write(name: str) -> bool:
    """Whether a function writes into its first argument, whose type therefore stays."""
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def writes(func: Any, kwargs: Any) -> bool:
    """Whether a call of a PyTorch function writes into its first argument, or into `out`."""
    name = getattr(func, "__name__", "")
    return is_write(name) or name == "__set__" or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def storage(x: Tensor) -> int:
    """Identity of the memory of a tensor, also of one without memory while torch.export traces."""
    return int(x.untyped_storage()._cdata)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """F.scaled_dot_product_attention in single operations, with zeros where a query has no visible key.

    torch.onnx translates it for four axes, and gives the average of all values where a query has no visible key.
    Shapes: [..., queries, head_dim], [..., keys, head_dim], [..., keys, value_dim].
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if factor != 1:
        root = math.sqrt(abs(factor))  # of both, so that float16 does not overflow
        query, key = query * math.copysign(root, factor), key * root
    scores = query @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores.softmax(-1) @ value
    is_exact = mask.dtype != torch.float16  # in which a large negative number in a mask becomes -inf with a score
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
    scores = scores + mask
    # a mask is usually smaller than the scores
    hidden = (mask if is_exact else scores).amax(-1, keepdim=True) == -math.inf
    return (scores.softmax(-1) @ value).masked_fill(hidden, 0)
