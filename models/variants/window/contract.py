"""The contract of window attention."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.window import WindowSpec
from effexport.models.variants.window.layer import WindowAttention


@torch.no_grad()
def exact(layer: WindowAttention, x: Tensor, keep: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √d) V in float64, one query at a time over the keys that it sees; 0 where it sees none."""
    spec = layer.spec
    q, k, v = (
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        for p in (layer.query, layer.key, layer.value)
    )
    out = torch.zeros_like(q)
    for b, kept in enumerate(keep.tolist()):
        for t in range(x.shape[1]):
            seen = [s for s in range(x.shape[1]) if kept[s] and sees(spec, t, s)]
            logits = (k[b, :, seen] @ q[b, :, t].unsqueeze(-1)).squeeze(-1) / spec.head_size**0.5
            out[b, :, t] = (torch.softmax(logits, dim=-1).unsqueeze(1) @ v[b, :, seen]).squeeze(1)
    return out.transpose(1, 2).flatten(-2)


def sees(spec: WindowSpec, t: int, s: int) -> bool:
    """True if token t sees token s."""
    if spec.causal and s > t:
        return False
    near = t - s < spec.window if spec.causal else abs(t - s) <= spec.window / 2
    return near or min(t, s) < spec.global_tokens


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="logits err by 4e-7 of the sums of absolute products that they are, and values have ten times their RMS",
    changed=WindowSpec(dim=96, heads=3, head_dim=16, seq_len=100, bias=False, window=24, global_tokens=2),
    small={"window": 8, "global_tokens": 1},
    forms={
        "no global token": {"global_tokens": 0},
        "several global tokens": {"global_tokens": 5},
        "window of two": {"window": 2},
        "wide window": {"window": 200},
        "odd causal window": {"window": 7, "causal": True, "global_tokens": 0},
        "causal with global tokens": {"causal": True, "global_tokens": 3},
    },
)
