"""AFT-full: a learned bias for every pair of positions (Zhai et al., 2021, arXiv 2105.14103, eq. 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.layers import at_least_float32
from effexport.models.variants.aft.layer import AFTPositionLayer, bias_full, gated_sums, near_diagonal
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.sums import (
    ExpSums,
    causal_block_size,
    causal_block_sums,
    earlier_block_sums,
    join_blocks,
    merge,
    split_blocks,
    sums_with_weights,
)

# Causal: with more blocks than this on the top level, blocks are made larger. The memory grows with their
# number.
MOST_BLOCKS = 16


class AFTFullAttention(AFTPositionLayer):
    """out_t = σ(q_t) ⊙ Σ_t' e^(k_t' + w_tt') ⊙ v_t' / Σ_t' e^(k_t' + w_tt').

    w is one number for each pair of positions, learned as u vᵀ or as it is. The causal form sums over t' ≤ t.
    O(seq² · dim) time; O(seq² + seq · dim) memory, with 16 times the second term in the causal form. The sums
    are matrix products of e^w and e^k, exact while the largest visible k + w of a row is within 80 of max k +
    max w over the keys of the product; in a graph for any length, max w is that of all positions of the row.
    """

    @property
    def does_without_mask(self) -> bool:
        return not self.spec.causal

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor | None) -> Tensor:
        self.check_length(projected[0].shape[-2])
        return self.mixed(projected, keep)

    def sums(self, keys: ExpSums) -> ExpSums:
        seq_len = keys.m.shape[-2]
        if self.spec.causal:
            return self.causal_sums(keys, seq_len)
        bias = self.biases(seq_len)
        # of a symbolic length, all positions: what depends on parameters only is computed once
        top_bias = bias.amax(dim=-1, keepdim=True)
        weights = torch.exp(bias - top_bias)[:seq_len, :seq_len]
        return sums_with_weights(keys, weights, top_bias[:seq_len])

    def biases(self, seq_len: int | torch.SymInt) -> Tensor:
        """w of the first positions, or of all for a symbolic length, float32."""
        if not self.is_factored:
            rows, _ = self.positions_and_blocks(seq_len, 1)
            return at_least_float32(self.position_bias)[:rows, :rows]
        # without the spare row: a graph given more positions than are learned must fail, not run on
        u, v = (x.flatten(0, 1)[: self.spec.seq_len] for x in self.position_factors(seq_len, 1))
        return u @ v.T

    def causal_sums(self, keys: ExpSums, seq_len: int) -> ExpSums:
        size = causal_block_size(self.spec.seq_len, MOST_BLOCKS)
        parts = split_blocks(keys, size)
        blocks = parts.m.shape[-3]
        if self.is_factored:
            u, v = self.position_factors(seq_len, size)
            pairs = u.flatten(0, 1) @ v.flatten(0, 1).T
        else:
            pairs = self.padded_biases(seq_len, size)
        bias = torch.unflatten(pairs[: blocks * size, : blocks * size], 0, (blocks, size))
        own_bias = u @ v.transpose(-1, -2) if self.is_factored else near_diagonal(pairs, size, before=0, after=0)
        sums = merge(causal_block_sums(parts, own_bias[:blocks]), earlier_block_sums(parts, bias))
        return join_blocks(sums, seq_len)


def exact(layer: AFTFullAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_full(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTFullSpec(seq_len=100, position_bias="full", position_dim=8),
    small={"position_dim": 8},
    forms={"full biases": {"position_bias": "full"}, "wide heads": {"head_dim": 16}},
)
