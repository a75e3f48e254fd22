"""The contract of softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.models.variants.softmax.layer import SoftmaxAttention


def projected(layer: SoftmaxAttention, x: Tensor) -> list[Tensor]:
    """q, k and v in float64, [batch, heads, seq, head_dim]."""
    heads = layer.spec.heads
    return [
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (heads, -1)).transpose(1, 2)
        for p in (layer.query, layer.key, layer.value)
    ]


@torch.no_grad()
def exact(layer: SoftmaxAttention, x: Tensor, keep: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √d) V in float64, one query at a time over the keys that it sees, plus the convolution of V."""
    q, k, v = projected(layer, x)
    out = torch.zeros_like(q)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            seen = keep[b, : t + 1 if layer.spec.causal else None].nonzero().flatten().tolist()
            logits = (k[b, :, seen] @ q[b, :, t].unsqueeze(-1)).squeeze(-1) / layer.spec.head_size**0.5
            out[b, :, t] = (torch.softmax(logits, dim=-1).unsqueeze(1) @ v[b, :, seen]).squeeze(1)
            if layer.conv is not None:
                taps = layer.conv.weight[:, 0, :, 0].double()
                for tap in range(taps.shape[1]):
                    source = t + tap - taps.shape[1] // 2
                    if source in seen:
                        out[b, :, t] += taps[:, tap, None] * v[b, :, source]
    return out.transpose(1, 2).flatten(-2)


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="logits err by 4e-7 of the sums of absolute products that they are, and values have ten times their RMS",
    changed=SoftmaxSpec(dim=96, heads=3, head_dim=16, seq_len=100, bias=False, conv_kernel_size=3),
    small={"conv_kernel_size": 5},
    forms={"no convolution": {"conv_kernel_size": None}, "wide heads": {"head_dim": 16}},
)
