"""The contract of Reformer's local attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.local.layer import LocalAttention


def visible_keys(spec: LocalSpec, t: int, keep: list[bool]) -> list[int]:
    """Positions that query t sees; circular chunks need a length that is a multiple of the chunk."""
    seq_len, chunk = len(keep), spec.chunk_length
    chunks = math.ceil(seq_len / chunk)
    seen = []
    for j in range(t // chunk - spec.num_chunks_before, t // chunk + spec.num_chunks_after + 1):
        if spec.circular or 0 <= j < chunks:
            seen += [s for s in range(j % chunks * chunk, (j % chunks + 1) * chunk) if s < seq_len]
    return [s for s in seen if keep[s] and not (spec.causal and s > t)]


@torch.no_grad()
def exact(layer: LocalAttention, x: Tensor, keep: Tensor) -> Tensor:
    """float64, one query at a time; zero for a query that sees nothing."""
    spec, size = layer.spec, layer.spec.head_size
    q, k, v = (x.double() @ p.weight.double().T for p in (layer.query, layer.key, layer.value))
    out = torch.zeros(*x.shape[:2], spec.inner_dim, dtype=torch.float64)
    for b, kept in enumerate(keep.tolist()):
        for t in range(x.shape[1]):
            keys = visible_keys(spec, t, kept)
            for h in range(spec.heads):
                lanes = slice(h * size, (h + 1) * size)
                logits = k[b, keys, lanes] @ q[b, t, lanes] / math.sqrt(size)
                out[b, t, lanes] = torch.softmax(logits, dim=0) @ v[b, keys, lanes]
    return out


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="logits of order ten, rounded by 6e-8 each, are relative errors of the weights",
    changed=LocalSpec(dim=96, heads=3, chunk_length=16, num_chunks_before=2, num_chunks_after=1, circular=True),
    small={"chunk_length": 8},
    forms={
        "own chunk": {"num_chunks_before": 0},
        "both sides": {"num_chunks_after": 1},
        "two before": {"num_chunks_before": 2},
        "two after": {"num_chunks_before": 0, "num_chunks_after": 2},
    },
)
