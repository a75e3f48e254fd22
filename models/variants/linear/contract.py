"""The contract of linear attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import LinearAttention


def features(x: Tensor) -> Tensor:
    """elu(x) + 1 in float64."""
    return torch.where(x > 0, x + 1, x.exp())


def mapped(layer: LinearAttention, q: Tensor, k: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) by the formulas in the docstring of `LinearSpec`, 0 for hidden keys."""
    spec, visible = layer.spec, keep[:, None, :, None]
    if spec.feature_map == "softmax":
        weights = k.exp() * visible
        if not spec.causal:
            weights = weights / weights.sum(dim=2, keepdim=True)
        return torch.softmax(q, dim=-1) / spec.head_size**0.5, weights
    maps: dict[str, Callable[[Tensor], Tensor]] = {"elu": features, "relu": lambda x: x.clamp(min=0), "exp": torch.exp}
    return maps[spec.feature_map](q), maps[spec.feature_map](k) * visible


@torch.no_grad()
def exact(layer: LinearAttention, x: Tensor, keep: Tensor) -> Tensor:
    """The explicit matrix φ(q_i)·φ(k_j) m_j, its rows divided by their sums plus eps, for all options, in float64."""
    spec = layer.spec
    q, k, v = (
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        for p in (layer.query, layer.key, layer.value)
    )
    q, k = mapped(layer, q, k, keep)
    matrix = q @ k.transpose(-1, -2)
    if spec.blindspot > 1:
        block = torch.arange(x.shape[1]) // spec.blindspot
        matrix = matrix * (block[:, None] > block[None, :])
    elif spec.causal:
        matrix = matrix.tril()
    if spec.normalizer:
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + spec.eps).clamp(min=spec.min_denominator)
    out: Tensor = matrix @ v
    return out.transpose(1, 2).flatten(-2)


CONTRACT = VariantContract(
    exact=exact,
    limit=3e-6,
    reason="sums of positive terms lose nothing by cancellation: some roundings of 6e-8; 9e-7 was measured",
    changed=LinearSpec(dim=96, heads=3, seq_len=63, causal=True, eps=1e-5, chunk_length=16),
    small={"chunk_length": 16},
    forms={
        "relu": {"feature_map": "relu"},
        "exp": {"feature_map": "exp"},
        "softmax": {"feature_map": "softmax"},
        "no denominator": {"normalizer": False},
        "large denominator": {"min_denominator": 20.0},
        "softmax without a denominator": {"feature_map": "softmax", "normalizer": False, "causal": False},
        "softmax and a small denominator": {"feature_map": "softmax", "eps": 0.0, "min_denominator": 1e-3},
        "blindspot": {"feature_map": "softmax", "min_denominator": 1e-3, "blindspot": 4, "causal": True},
        "long chunks": {"chunk_length": 200},
        "chunks of one": {"chunk_length": 1},
    },
)
