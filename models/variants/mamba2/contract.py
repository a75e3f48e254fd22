"""The contract of Mamba-2."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.delta.contract import convolved
from effexport.models.variants.mamba2 import Mamba2Spec
from effexport.models.variants.mamba2.layer import Mamba2


@torch.no_grad()
def exact(layer: Mamba2, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token and head by head, in float64: convolution, recurrence, gate and normalisation."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    inputs = torch.cat([linear(x) for linear in (layer.query, layer.key, layer.value)], dim=-1)
    sums = torch.stack([convolved(own, kept, layer.taps) for own, kept in zip(inputs, keep, strict=True)])
    step, gate = F.softplus(layer.dt(x) + layer.dt_bias), F.silu(layer.gate(x))
    state = torch.zeros(len(x), spec.heads, spec.head_size, spec.value_size, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        widths = [spec.key_width, spec.key_width, spec.heads * spec.value_size]
        c, b, v = F.silu(sums[:, t] + layer.taps_bias).split(widths, dim=-1)
        c, b = (y.unflatten(-1, (spec.groups, -1)) for y in (c, b))
        v = v.unflatten(-1, (spec.heads, -1))
        read = torch.zeros_like(v)
        for head in range(spec.heads):
            group = head * spec.groups // spec.heads
            delta = step[:, t, head, None, None]
            kept = torch.exp(-delta * layer.a_log[head].exp()) * state[:, head]
            following = kept + delta * b[:, group, :, None] * v[:, head, None, :]
            state[:, head] = torch.where(keep[:, t, None, None], following, state[:, head])
            read[:, head] = (c[:, group, None] @ state[:, head]).squeeze(1) + layer.skip[head] * v[:, head]
        gated = (read.flatten(1) * gate[:, t]).unflatten(-1, (spec.groups, -1))
        mean = gated.square().mean(-1, keepdim=True)
        outputs.append((gated / (mean + spec.norm_eps).sqrt()).flatten(1) * layer.norm.weight)
    return torch.stack(outputs, dim=1)


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 9e-6 was measured",
    changed=Mamba2Spec(dim=96, heads=6, seq_len=63, head_dim=8, value_dim=32, conv_size=2, groups=2, norm_eps=1e-6),
    small={"chunk_length": 8, "groups": 2},
    forms={
        "one group": {"groups": 1},
        "a group for each head": {"groups": 4, "conv_size": 2},
        "wide heads": {"value_dim": 16, "head_dim": 5, "chunk_length": 200},
    },
)
