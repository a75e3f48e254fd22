"""The contract of AFT-conv."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.variants.aft.contract import gated_sums
from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_conv.layer import AFTConvAttention
from effexport.models.variants.contract import VariantContract


def bias_conv(layer: AFTConvAttention, seq_len: int) -> Tensor:
    """The re-parameterised tap of every offset t' − t, 0 outside the filter: float64 [heads, seq, seq]."""
    weight, half = layer.weight.detach().double(), layer.spec.kernel_size // 2
    variance = weight.var(dim=1, keepdim=True, unbiased=False)
    taps = (weight - weight.mean(dim=1, keepdim=True)) / torch.sqrt(variance + layer.spec.std_eps**2)
    taps = layer.gamma.detach().double()[:, None] * taps + layer.beta.detach().double()[:, None]
    w = torch.zeros(layer.spec.heads, seq_len, seq_len, dtype=torch.float64)
    for tap in range(layer.spec.kernel_size):
        if abs(tap - half) < seq_len:
            w.diagonal(tap - half, 1, 2)[:] = taps[:, tap, None]
    return w


def exact(layer: AFTConvAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_conv(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTConvSpec(kernel_size=5, std_eps=1e-3),
    small={"kernel_size": 5},
    forms={"one tap": {"kernel_size": 1}, "a long filter": {"kernel_size": 145}, "wide heads": {"head_dim": 16}},
)
