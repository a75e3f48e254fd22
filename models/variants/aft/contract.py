"""Reference formulas of AFT layers: gated sums of values with weights e^(k + w)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from effexport.models.layers import AttentionLayer
from effexport.models.variants.aft.layer import AFTPositionLayer


@torch.no_grad()
def gated_sums(layer: AttentionLayer, x: Tensor, keep: Tensor, w: Tensor) -> Tensor:
    """x [batch, seq, dim], keep [batch, seq], w [heads, seq, seq] → float64 [batch, seq, inner], a query at a time."""
    x, heads = x.double(), w.shape[0]

    def projected(name: str) -> Tensor:
        projection = getattr(layer, name)
        return linear(x, projection.weight.double(), None if projection.bias is None else projection.bias.double())

    k, v = (projected(name).unflatten(-1, (heads, -1)) for name in ("key", "value"))
    context = torch.zeros_like(v)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            end = t + 1 if layer.spec.causal else x.shape[1]
            seen = keep[b, :end].nonzero().flatten()
            if len(seen):
                logits = k[b, seen] + w[:, t, seen].double().T[..., None]
                context[b, t] = (torch.softmax(logits, dim=0) * v[b, seen]).sum(dim=0)
    return torch.sigmoid(projected("query")) * context.flatten(-2)


def bias_full(layer: AFTPositionLayer, seq_len: int) -> Tensor:
    """w of the first positions, as it is or u vᵀ: float64 [1, seq, seq]."""
    if layer.spec.position_bias == "full":
        return layer.position_bias.detach().double()[None, :seq_len, :seq_len]
    u, v = layer.position_query.detach().double(), layer.position_key.detach().double()
    return (u @ v.T)[None, :seq_len, :seq_len]
