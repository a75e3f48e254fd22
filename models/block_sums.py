"""Sums of exp(key + position bias)·value by blocks: causal and banded biases, cheap and exact.

Built on the triples of `exp_sums`. Axes: (batch, heads, blocks, size, channels), where a block is `size`
neighbouring tokens; a bias is [heads or 1, blocks or 1, size, keys]. No sum is ever corrected by
subtraction: e^w − 1 cancels when a strongly negative bias meets the largest key.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.variants.sums import (
    ABSENT,
    FLOOR,
    ExpSums,
    causal_pair_sums,
    join_blocks,
    merge,
    prefix_sums,
    shift,
    split_blocks,
    total,
    weighted_sums,
)

# A causal block of this size is summed pair by pair; larger ones are cut into RADIX parts, again and again.
PAIR_BLOCK = 8
RADIX = 8


def causal_block_size(reach: int, most_blocks: int) -> int:
    """The smallest size PAIR_BLOCK · RADIXⁿ of which at most `most_blocks` blocks cover `reach` tokens."""
    size = PAIR_BLOCK
    while size * most_blocks < reach:
        size *= RADIX
    return size


def causal_block_sums(keys: ExpSums, bias: Tensor) -> ExpSums:
    """Σ over t' ≤ t inside every block.

    keys [..., size, channels]; bias [..., size, size]; size = 8, 64, 512, … Returns the shape of keys.
    Each level has its own stabilisers, taken over keys that are visible to all its queries: a later key of
    any size leaves earlier rows alone. O(size · RADIX · channels) memory per block.
    """
    size = bias.shape[-1]
    if size <= PAIR_BLOCK:
        return causal_pair_sums(keys, bias)
    part = size // RADIX
    parts = keys.each(lambda x: torch.unflatten(x, -2, (RADIX, part)))
    own_bias = torch.stack([bias[..., i : i + part, i : i + part] for i in range(0, size, part)], dim=-3)
    own = causal_block_sums(parts, own_bias)
    return join_blocks(merge(own, earlier_block_sums(parts, torch.unflatten(bias, -2, (RADIX, part)))), size)


def earlier_block_sums(keys: ExpSums, bias: Tensor) -> ExpSums:
    """Σ over the keys of all blocks before the block of the query.

    keys [..., blocks, size, channels]; bias [..., blocks, size, blocks · size] from queries to keys.
    Returns the shape of keys. O(blocks² · size · channels) memory: the stabiliser of a block of queries is
    the running maximum of the keys before it, so the keys are rescaled for each.
    """
    blocks, size = keys.m.shape[-3:-1]
    index = torch.arange(blocks, device=keys.m.device)
    earlier = (index[:, None] > index[None, :])[..., None, None]
    seen = torch.where(earlier, keys.m.unsqueeze(-4), ABSENT).flatten(-3, -2)
    pairs = torch.unflatten(bias, -1, (blocks, size))
    seen_bias = torch.where(earlier.transpose(-3, -2), pairs, ABSENT).flatten(-2)
    flat = keys.each(lambda x: x.flatten(-3, -2).unsqueeze(-3))
    return weighted_sums(ExpSums(seen, flat.n, flat.d), seen_bias)


def banded_sums(keys: ExpSums, bias: Tensor, reach: int) -> ExpSums:
    """Σ over all t' of e^(key + bias), with a bias for near keys only. O(seq · window · channels) time.

    keys [batch, heads, seq, channels]. bias [heads or 1, blocks or 1, size, window]: from the queries of a
    block to the keys of the `reach` blocks before it, itself and the `reach` blocks after it.
    """
    seq_len, size = keys.m.shape[-2], bias.shape[-2]
    blocks = split_blocks(keys, size)
    top = blocks.m.amax(dim=-2, keepdim=True).clamp(min=FLOOR)
    scale = torch.exp(blocks.m - top)
    blocks = ExpSums(top, scale * blocks.n, scale * blocks.d)
    near = near_sums(blocks, bias, reach)
    totals = ExpSums(top.squeeze(-2), blocks.n.sum(dim=-2), blocks.d.sum(dim=-2))
    index = torch.arange(totals.m.shape[-2], device=bias.device)
    is_far = (index[:, None] - index[None, :]).abs() > reach
    far = weighted_sums(totals, torch.where(is_far, 0.0, ABSENT).to(totals.m.dtype))
    return join_blocks(merge(near, far.each(lambda x: x.unsqueeze(-2))), seq_len)


def near_sums(blocks: ExpSums, bias: Tensor, reach: int) -> ExpSums:
    """Σ of e^(key + bias) over the keys of the `reach` blocks before that of a query, its own and those after it.

    blocks: m [batch, heads, blocks, 1, channels], one stabiliser for a block; n and d [..., blocks, size, channels].
    Returns [..., blocks, size, channels], with the m of a block and query. One product for each neighbour: a window of
    several blocks is never laid out, which would take as many times the memory.
    """
    count, size, channels = blocks.n.shape[-3:]
    top_bias = bias.amax(dim=-1, keepdim=True).clamp(min=FLOOR)
    weights = torch.exp(bias - top_bias)
    columns = F.pad(torch.cat([blocks.n, blocks.d], dim=-1), (0, 0, 0, 0, reach, reach))
    tops = F.pad(blocks.m, (0, 0, 0, 0, reach, reach), value=ABSENT)
    around = [tops[:, :, i : count + i] for i in range(2 * reach + 1)]
    top = functools.reduce(torch.maximum, around)
    parts = []
    for i, m in enumerate(around):
        scale = torch.exp(m - top)
        # n has the channels of v, d those of m
        scales = torch.cat([scale.expand(*scale.shape[:-1], channels), scale], dim=-1)
        parts.append(weights[..., i * size : (i + 1) * size] @ (scales * columns[:, :, i : count + i]))
    products = functools.reduce(torch.add, parts)
    return ExpSums(top + top_bias, products[..., :channels], products[..., channels:])


def causal_banded_sums(keys: ExpSums, bias: Tensor, reach: int) -> ExpSums:
    """Σ over t' ≤ t of e^(key + bias), with a bias for near keys only.

    keys [batch, heads, seq, channels]. bias [heads or 1, blocks or 1, size, (reach + 1) · size]: from the
    queries of a block to the keys of the `reach` blocks before it and of itself.
    """
    seq_len, size = keys.m.shape[-2], bias.shape[-2]
    blocks = split_blocks(keys, size)
    sums = causal_block_sums(blocks, bias[..., reach * size :])
    if reach:
        sums = merge(sums, weighted_sums(neighbours(blocks, -reach, -1), bias[..., : reach * size]))
    far = shift(prefix_sums(total(blocks)), reach + 1)
    return join_blocks(merge(sums, far.each(lambda x: x.unsqueeze(-2))), seq_len)


def neighbours(blocks: ExpSums, first: int, last: int) -> ExpSums:
    """The keys of blocks b + first to b + last, in order, for every block b; absent keys beyond the ends.

    [batch, heads, blocks, size, channels] → [batch, heads, blocks, (last − first + 1) · size, channels].
    """
    count = blocks.m.shape[2]
    padded = blocks.pad(-first, max(last, 0), axis=-3)
    parts = range(last - first + 1)
    return padded.each(lambda x: torch.cat([x[:, :, i : count + i] for i in parts], dim=3))
