"""Softmax attention (Vaswani et al., 2017, eq. 1): the baseline of the other variants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effexport.models.layers import DepthwiseConv, MultiHeadAttention, causal_mask, masked_softmax
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.plugins.masked_attention.op import masked_attention
from effexport.plugins.sequence_conv.op import sequence_conv


class SoftmaxAttention(MultiHeadAttention):
    """out = softmax(Q Kᵀ / √d) V, optionally plus a depth-wise convolution of V.

    O(seq² · dim) time, O(seq² · heads) memory. A sample without any visible key averages over all of its keys.
    """

    def __init__(self, spec: SoftmaxSpec) -> None:
        super().__init__(spec)
        size = spec.conv_kernel_size
        self.conv = None if size is None else DepthwiseConv(spec.heads, size)

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        q, k, v = projected
        if self.fused and not self.spec.causal:
            context: Tensor = masked_attention(q, k, v, keep, 1 / math.sqrt(q.shape[-1]))
            return context if self.conv is None else sequence_conv(v, self.conv.weight, keep, context)
        visible = keep[:, None, None, :]
        if self.spec.causal:
            visible = visible & causal_mask(q.shape[2], q.device)
        context = softmax_attention(q, k, v, visible)
        if self.conv is not None:
            # padding must not reach its neighbours through the filter
            context = context + self.conv(torch.where(keep[:, None, :, None], v, 0.0))
        return context


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] three times, boolean visible [batch, 1, 1 or seq, seq] → the shape of v.

    Queries and keys are both scaled by d^(-1/4), so that half-precision logits do not overflow first.
    """
    divisor = math.sqrt(math.sqrt(q.shape[-1]))
    logits = (q / divisor) @ (k / divisor).transpose(-1, -2)
    return masked_softmax(logits, visible).to(v.dtype) @ v


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
    empty_is_zero=False,
    hides_nan=False,
    reason="logits err by 4e-7 of the sums of absolute products that they are, and values have ten times their RMS",
    changed=SoftmaxSpec(dim=96, heads=3, head_dim=16, seq_len=100, bias=False, conv_kernel_size=3),
    small={"conv_kernel_size": 5},
    forms={"no convolution": {"conv_kernel_size": None}, "wide heads": {"head_dim": 16}},
)
