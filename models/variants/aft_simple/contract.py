"""The contract of AFT-simple."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.variants.aft.contract import gated_sums
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention
from effexport.models.variants.contract import VariantContract


def bias_simple(layer: AFTSimpleAttention, seq_len: int) -> Tensor:
    """No position bias: [1, seq, seq] zeros."""
    return torch.zeros(1, seq_len, seq_len, dtype=torch.float64)


def exact(layer: AFTSimpleAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_simple(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTSimpleSpec(dim=30, heads=4, causal=True),
    small={},
    forms={"wide heads": {"head_dim": 16}},
)
