"""The contract of LSH attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHAttention


@torch.no_grad()
def exact(layer: LSHAttention, x: Tensor, keep: Tensor) -> Tensor:
    """float64, one query at a time. `keep` and x may have any length."""
    spec, size = layer.spec, layer.spec.head_size
    batch, seq_len, _ = x.shape
    out = torch.zeros(batch, seq_len, spec.inner_dim, dtype=torch.float64)
    qk = x.double() @ layer.query_key.weight.double().T
    v = x.double() @ layer.value.weight.double().T
    for b in range(batch):
        for h in range(spec.heads):
            lanes = slice(h * size, (h + 1) * size)
            visible = set(keep[b].nonzero().flatten().tolist())
            out[b, :, lanes] = slow_head(layer, h, qk[b, :, lanes], v[b, :, lanes], visible)
    return out


def slow_head(layer: LSHAttention, head: int, qk: Tensor, v: Tensor, kept: set[int]) -> Tensor:
    spec = layer.spec
    keys = qk / (qk.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(spec.head_size)
    outs, lses = [], []
    for r in range(spec.num_hashes):
        buckets = slow_buckets(spec, layer.hash.rotations[head, :, r].double(), qk)
        # padding comes last, in a bucket of its own
        in_order = sorted(range(len(qk)), key=lambda t: (t not in kept, buckets[t] if t in kept else 0, t))
        out, lse = torch.zeros_like(v), torch.full((len(qk),), -1e5, dtype=torch.float64)
        for place, t in enumerate(in_order):
            first = (place // spec.chunk_length - spec.num_chunks_before) * spec.chunk_length
            last = (place // spec.chunk_length + 1 + spec.num_chunks_after) * spec.chunk_length
            window = [s for s in in_order[max(0, first) : last] if s in kept or s == t]
            others = [s for s in window if s != t and not (spec.causal and s > t)]
            if not others:
                out[t] = v[t]
                continue
            logits = keys[others] @ qk[t]
            lse[t] = torch.logsumexp(logits, dim=0)
            out[t] = torch.softmax(logits, dim=0) @ v[others]
        outs.append(out)
        lses.append(lse)
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights.unsqueeze(-1) * torch.stack(outs)).sum(dim=0)


def slow_buckets(spec: LSHSpec, rotations: Tensor, qk: Tensor) -> list[int]:
    """rotations [head_dim, Σ factor / 2]; first factor least significant."""
    buckets = []
    for vector in qk:
        bucket, stride, start = 0, 1, 0
        for factor in spec.bucket_factors:
            projection = vector @ rotations[:, start : start + factor // 2]
            values = [*projection.tolist(), *(-projection).tolist()]
            bucket += stride * values.index(max(values))
            stride, start = stride * factor, start + factor // 2
        buckets.append(bucket)
    return buckets


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="logits of order ten, rounded by 6e-8 each, are relative errors of the weights",
    changed=LSHSpec(
        bias=True,
        chunk_length=16,
        num_chunks_before=2,
        num_chunks_after=1,
        circular=True,
        num_hashes=4,
        num_buckets=(4, 8),
        hash_seed=7,
        mask_constants="hf",
    ),
    small={"chunk_length": 8},
    forms={
        "own chunk": {"num_chunks_before": 0},
        "both sides": {"num_chunks_after": 1, "num_buckets": (2, 4)},
        "two before": {"num_chunks_before": 2, "num_hashes": 3},
    },
)
