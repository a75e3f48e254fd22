"""The contract of gated linear attention."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.gla import GLASpec
from effexport.models.variants.gla.layer import GatedLinearAttention


@torch.no_grad()
def exact(layer: GatedLinearAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token, in float64: every row of the state has a decay of its own."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    projected = [linear(x) for linear in (layer.query, layer.key, layer.value, layer.gate)]
    projected.append(layer.decay_up(layer.decay_down(x)))
    q, k, v, g, logits = (y.unflatten(-1, (spec.heads, -1)) for y in projected)
    alpha = torch.sigmoid(logits) ** (1 / spec.gate_logit_normalizer)
    state = torch.zeros(len(x), spec.heads, spec.head_size, spec.value_size, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        following = alpha[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        state = torch.where(keep[:, t, None, None, None], following, state)
        read = torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / spec.head_size**0.5
        mean = read.square().mean(-1, keepdim=True)
        outputs.append(read / (mean + spec.norm_eps).sqrt() * layer.norm.weight * F.silu(g[:, t]))
    return torch.stack(outputs, dim=1).flatten(2)


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 1e-5 was measured",
    changed=GLASpec(dim=96, heads=3, seq_len=63, value_dim=24, gate_low_rank_dim=4, gate_logit_normalizer=2.0),
    small={"chunk_length": 8},
    forms={"fast decay": {"gate_logit_normalizer": 1.0}, "long chunks": {"chunk_length": 200, "value_dim": 5}},
)
