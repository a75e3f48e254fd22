"""Sums of exp(key)·value that cannot overflow: the arithmetic of the attention-free transformer.

A set of keys k with values v is held as three tensors (m, n, d): a stabiliser m, n = Σ e^(k−m) v and d = Σ
e^(k−m). n / d is the softmax average of v whatever m is; m only keeps the exponents in range (online
softmax, Milakov & Gimelshein, 2018, arXiv 1805.02867). Everything is float32. Absent keys have m = ABSENT
and n = d = 0: finite numbers, because −inf − (−inf) is NaN.

By blocks of `size` neighbouring tokens, (batch, heads, blocks, size, channels), causal and banded biases are cheap and
exact; a bias is [heads or 1, blocks or 1, size, keys]. No sum is ever corrected by subtraction: e^w − 1 cancels when a
strongly negative bias meets the largest key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import at_least_float32

# Exponent of a key that is not there, and the least value of a stabiliser. They differ so much that
# exp(ABSENT − stabiliser) is exactly 0 even where nothing at all is visible.
ABSENT = -1e30
FLOOR = -1e29
# A sum of e^x is larger, unless every e^x in it is 0.
TINY = torch.finfo(torch.float32).tiny

# Rows per block on the levels of a prefix scan, which leave seq / 1024 rows for the last step. Small blocks
# first: the memory of a level is its rows times its block size.
SCAN_BLOCKS = (4, 8, 32)


class ExpSums(NamedTuple):
    """m, n, d, each [..., seq, channels]. m and d may have a single channel that all channels of n share."""

    m: Tensor
    n: Tensor
    d: Tensor

    def each(self, fn: Callable[[Tensor], Tensor]) -> ExpSums:
        """The same rearrangement of all three tensors."""
        return ExpSums(fn(self.m), fn(self.n), fn(self.d))

    def pad(self, before: int, after: int, axis: int = -2) -> ExpSums:
        """Absent keys added at both ends of `axis`, which counts from the end."""
        widths = [0, 0] * (-axis - 1) + [before, after]
        return ExpSums(F.pad(self.m, widths, value=ABSENT), F.pad(self.n, widths), F.pad(self.d, widths))


def sums_of_tokens(key: Tensor, value: Tensor, keep: Tensor | None) -> ExpSums:
    """One triple per token; without a mask, one d for all of them.

    key [batch, heads, seq, 1 or channels]; value [batch, heads, seq, channels]; keep boolean [batch, seq].
    Padding is replaced, not multiplied by zero: it may hold anything, NaN too.
    """
    if keep is None:
        m = at_least_float32(key)
        return ExpSums(m, at_least_float32(value), m.new_ones(1, 1, 1, 1))
    visible = keep[:, None, :, None]
    m = torch.where(visible, at_least_float32(key), ABSENT)
    return ExpSums(m, torch.where(visible, at_least_float32(value), 0.0), visible.to(m.dtype).expand_as(m))


def average(sums: ExpSums) -> Tensor:
    """n / d, and 0 where no key is visible: n and d are 0 there."""
    return sums.n / sums.d.clamp(min=TINY)


def merge(a: ExpSums, b: ExpSums) -> ExpSums:
    """The sums over the union of two sets of keys. The shapes broadcast."""
    m = torch.maximum(a.m, b.m)
    scale_a, scale_b = torch.exp(a.m - m), torch.exp(b.m - m)
    return ExpSums(m, scale_a * a.n + scale_b * b.n, scale_a * a.d + scale_b * b.d)


def total(sums: ExpSums) -> ExpSums:
    """The sums over seq: [..., seq, channels] → [..., channels]."""
    m = sums.m.amax(dim=-2, keepdim=True).clamp(min=FLOOR)
    scale = torch.exp(sums.m - m)
    return ExpSums(m.squeeze(-2), (scale * sums.n).sum(dim=-2), (scale * sums.d).sum(dim=-2))


def weighted_sums(keys: ExpSums, bias: Tensor) -> ExpSums:
    """Σ over keys of e^(key + bias), for every query, by one matrix product.

    keys [..., keys, channels]; bias [..., queries, keys], ABSENT where a pair is not to be seen. Returns
    [..., queries, channels]. Keys and biases get a stabiliser each, since e^key and e^bias are separate
    factors: the result is exact while, for a query, some visible key + bias is within 80 of max(key) +
    max(bias).
    """
    top_key = keys.m.amax(dim=-2, keepdim=True).clamp(min=FLOOR)
    top_bias = bias.amax(dim=-1, keepdim=True).clamp(min=FLOOR)
    scale = torch.exp(keys.m - top_key)
    columns = torch.cat([scale * keys.n, scale * keys.d], dim=-1)
    products = torch.exp(bias - top_bias) @ columns
    channels = keys.n.shape[-1]
    return ExpSums(top_key + top_bias, products[..., :channels], products[..., channels:])


def sums_with_weights(keys: ExpSums, weights: Tensor, top_bias: Tensor) -> ExpSums:
    """As `weighted_sums`, for e^(bias - top_bias) [..., queries, keys]. keys: of tokens, also without a mask."""
    top_key = keys.m.amax(dim=-2, keepdim=True).clamp(min=FLOOR)
    scale = torch.exp(keys.m - top_key)
    return ExpSums(top_key + top_bias, weights @ (scale * keys.n), weights @ (scale * keys.d))


def causal_pair_sums(keys: ExpSums, bias: Tensor | None = None) -> ExpSums:
    """Σ over t' ≤ t of e^(key + bias) with one stabiliser per (t, channel): exact for any keys and biases.

    keys [..., seq, channels]; bias [..., seq, seq] or None for no bias. O(seq² · channels) memory: for
    short blocks.
    """
    position = torch.arange(keys.m.shape[-2], device=keys.m.device)
    visible = (position[:, None] >= position[None, :])[..., None]
    exponents = keys.m.unsqueeze(-3)
    if bias is not None:
        exponents = exponents + bias.unsqueeze(-1)
    exponents = torch.where(visible, exponents, ABSENT)
    m = exponents.amax(dim=-2, keepdim=True).clamp(min=FLOOR)
    scale = torch.exp(exponents - m)
    n = (scale * keys.n.unsqueeze(-3)).sum(dim=-2)
    d = (scale * keys.d.unsqueeze(-3)).sum(dim=-2)
    return ExpSums(m.squeeze(-2), n, d)


def block_count(seq_len: int | torch.SymInt, size: int) -> int:
    """The number of blocks of `size` that cover seq_len tokens; one more, all padding, when seq_len is symbolic.

    torch.export takes a size of 1 for a constant. Without the spare block, exporting with an example that
    fits into one block would yield a graph that is only valid up to one block.
    """
    if isinstance(seq_len, int):
        return (seq_len + size - 1) // size
    spare: int = (seq_len + size - 1) // size + 1
    return spare


def split_blocks(sums: ExpSums, size: int) -> ExpSums:
    """[..., seq, channels] → [..., blocks, size, channels], with absent keys after the end."""
    seq_len = sums.m.shape[-2]
    blocks = block_count(seq_len, size)
    padded = sums.pad(0, blocks * size - seq_len)
    return padded.each(lambda x: torch.unflatten(x, -2, (blocks, size)))


def join_blocks(sums: ExpSums, seq_len: int) -> ExpSums:
    """The inverse of `split_blocks`."""
    return sums.each(lambda x: x.flatten(-3, -2)[..., :seq_len, :])


def shift(sums: ExpSums, by: int) -> ExpSums:
    """Row t becomes row t − by; the first rows become absent."""
    seq_len = sums.m.shape[-2]
    return sums.pad(by, 0).each(lambda x: x[..., :seq_len, :])


def prefix_sums(sums: ExpSums, sizes: tuple[int, ...] = SCAN_BLOCKS) -> ExpSums:
    """Row t becomes the sums over rows 0 to t. [..., seq, channels], any seq, also a symbolic one.

    Pair by pair inside blocks of sizes[0]; then the same for the totals of the blocks, to a fixed depth, so
    that the exported graph holds no loop. A later row never influences an earlier one, however large its
    key. O(seq · sizes[0] · channels) memory.
    """
    if not sizes:
        return causal_pair_sums(sums)
    seq_len = sums.m.shape[-2]
    inside = causal_pair_sums(split_blocks(sums, sizes[0]))
    before = shift(prefix_sums(inside.each(lambda x: x[..., -1, :]), sizes[1:]), 1)
    return join_blocks(merge(inside, before.each(lambda x: x.unsqueeze(-2))), seq_len)


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
