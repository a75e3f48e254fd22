"""The contract of AFT-local."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.variants.aft.contract import bias_full, gated_sums
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_local.layer import AFTLocalAttention
from effexport.models.variants.contract import VariantContract


def bias_local(layer: AFTLocalAttention, seq_len: int) -> Tensor:
    """The w of AFT-full where |t − t'| < window, 0 elsewhere: float64 [1, seq, seq]."""
    positions = torch.arange(seq_len)
    near = (positions[:, None] - positions).abs() < layer.spec.window
    return bias_full(layer, seq_len) * near


def exact(layer: AFTLocalAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_local(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTLocalSpec(position_dim=8, window=0),
    small={"position_dim": 8, "window": 8},
    forms={
        "full biases": {"position_bias": "full"},
        "no window": {"window": 0},
        "own position": {"window": 1},
        "a long window": {"window": 90},
        "wide heads": {"head_dim": 16},
    },
)
