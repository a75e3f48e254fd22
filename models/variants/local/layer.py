"""Reformer's local attention, chunks in their original order, and what its two kinds of layers share: windows of
chunks, masks and the softmax over a window. A layer of Reformer models, not a variant of its own.

Axes: (groups, rounds, chunks, chunk_length, …) with groups = batch × heads; a local layer has one round.
Source: Kitaev et al., 2020, arXiv 2001.04451, section 2, and the semantics of transformers 4.57.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import MultiHeadAttention, at_least_float32
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.local import LocalSpec, LookAroundSpec

# Overwrites hidden logits, float32. The logit of a token itself lies between these and all others: a token attends to
# itself only when nothing else is visible.
HIDDEN_LOGIT = -1e9


def chunk_count(seq_len: int, chunk_length: int) -> int:
    """The number of chunks that cover seq_len tokens; the last one may be partly padding."""
    return (seq_len + chunk_length - 1) // chunk_length


def look_around(x: Tensor, spec: LookAroundSpec, fill: float = 0) -> Tensor:
    """Each chunk together with its neighbours.

    x [groups, rounds, chunks, chunk_length, …] → [groups, rounds, chunks, window, …] with
    window = (before + 1 + after) · chunk_length. Beyond the ends of a round there is `fill`, or, if circular, the
    other end of all rounds in a row.
    """
    before, after = spec.num_chunks_before, spec.num_chunks_after
    if before == after == 0:
        return x
    if spec.circular:
        flat = x.flatten(1, 2)
        shifted = [flat if by == 0 else flat.roll(-by, dims=1) for by in range(-before, after + 1)]
        return torch.unflatten(torch.cat(shifted, dim=2), 1, tuple(x.shape[1:3]))
    ends = list(x.shape)
    ends[2] = before
    parts = [torch.full(ends, fill, dtype=x.dtype, device=x.device)] if before else []
    parts.append(x)
    ends[2] = after
    parts += [torch.full(ends, fill, dtype=x.dtype, device=x.device)] if after else []
    extended = torch.cat(parts, dim=2)
    chunks = x.shape[2]
    return torch.cat([extended[:, :, i : chunks + i] for i in range(before + 1 + after)], dim=3)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    is_self: Tensor | None = None,
    *,
    self_logit: float = 0.0,
    penalty: Tensor | None = None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every chunk over its window.

    q [groups, rounds, chunks, chunk_length, head_dim]; k, v [… chunks, window, head_dim]; visible and is_self boolean
    [… chunk_length, window]. Returns the context like q, and the float32 log-sum-exp of every row, [… chunk_length].
    self_logit: the logit of a token's own key. penalty: subtracted from all logits.
    rounded: weights exp(x − lse) as in transformers, which near x = −1e5 do not add up to one.
    """
    logits = at_least_float32(q @ k.transpose(-1, -2))
    logits = torch.where(visible, logits, HIDDEN_LOGIT)
    if is_self is not None:
        logits = torch.where(is_self, self_logit, logits)
    if penalty is not None:
        logits = logits - penalty
    # written out: runtimes import ReduceLogSumExp without subtracting the maximum
    highest = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - highest)
    total = weights.sum(dim=-1, keepdim=True)
    lse = highest + torch.log(total)
    weights = torch.exp(logits - lse) if rounded else weights / total
    return weights.to(v.dtype) @ v, lse.squeeze(-1)


class LocalAttention(MultiHeadAttention):
    """Softmax attention of every chunk over itself and its neighbours.

    O(seq · chunk_length · dim) time. With `circular=True`, the published behaviour, the first chunk also sees the
    last one: harmless with causal masks, a leak from end to start without them.
    """

    spec: LocalSpec

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        spec = self.spec
        batch, seq_len = keep.shape
        chunks = chunk_count(seq_len, spec.chunk_length)
        pad = chunks * spec.chunk_length - seq_len
        chunked = (batch * spec.heads, 1, chunks, spec.chunk_length)
        q, k, v = (F.pad(x, (0, 0, 0, pad)).reshape(*chunked, spec.head_size) for x in projected)
        k = look_around(k / math.sqrt(spec.head_size), spec)
        visible = look_around(
            F.pad(keep, (0, pad)).reshape(batch, 1, chunks, spec.chunk_length), spec
        ).repeat_interleave(spec.heads, dim=0)
        visible = visible.unsqueeze(3)
        if spec.causal:
            position = torch.arange(chunks * spec.chunk_length, device=q.device)
            position = position.reshape(1, 1, chunks, spec.chunk_length)
            visible = visible & (position.unsqueeze(4) >= look_around(position, spec, fill=-1).unsqueeze(3))
        context, _ = window_attention(q, k, look_around(v, spec), visible)
        return context.reshape(batch, spec.heads, -1, spec.head_size)[:, :, :seq_len]


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
    empty_is_zero=False,
    hides_nan=False,
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
