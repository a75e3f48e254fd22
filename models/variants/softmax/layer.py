"""Softmax attention (Vaswani et al., 2017, eq. 1): the baseline of the other variants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effexport.models.layers import DepthwiseConv, MultiHeadAttention, causal_mask, masked_softmax
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
