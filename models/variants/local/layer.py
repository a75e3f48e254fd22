"""Reformer's local attention: chunks in their original order. A layer of Reformer models, not a variant of its own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import MultiHeadAttention
from effexport.models.variants.local.look_around import chunk_count, look_around, window_attention
from effexport.models.variants.local.spec import LocalSpec


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
