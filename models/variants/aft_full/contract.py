"""The contract of AFT-full."""

from __future__ import annotations

from torch import Tensor

from effexport.models.variants.aft.contract import bias_full, gated_sums
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention
from effexport.models.variants.contract import VariantContract


def exact(layer: AFTFullAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_full(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTFullSpec(seq_len=100, position_bias="full", position_dim=8),
    small={"position_dim": 8},
    forms={"full biases": {"position_bias": "full"}, "wide heads": {"head_dim": 16}},
)
