"""The contract of the gated delta rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.delta.contract import by_token, projected
from effexport.models.variants.gated_delta import GatedDeltaSpec
from effexport.models.variants.gated_delta.layer import GatedDeltaAttention


@torch.no_grad()
def exact(layer: GatedDeltaAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token, in float64."""
    rate, step = layer.a_log.double().exp(), F.softplus(projected(layer.decay, x) + layer.dt_bias.double())
    samples = zip(x, keep, -rate * step, strict=True)
    return torch.stack([by_token(layer, *sample) for sample in samples]) * F.silu(projected(layer.gate, x))


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 1.5e-5 was measured",
    changed=GatedDeltaSpec(dim=96, heads=3, seq_len=63, conv_size=2, value_dim=24, chunk_length=16, norm_eps=1e-6),
    small={"chunk_length": 8},
    forms={
        "no convolution": {"conv_size": 0},
        "two taps": {"conv_size": 2},
        "narrow values": {"value_dim": 5},
        "long chunks": {"chunk_length": 200},
        "chunks of one": {"chunk_length": 1},
    },
)
