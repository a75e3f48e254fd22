"""AFT-local: position biases for near pairs only (Zhai et al., 2021, arXiv 2105.14103, eq. 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.validation import SpecError
from effexport.models.variants.aft.layer import AFTPositionLayer, bias_full, gated_sums, later_columns, near_diagonal
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_simple.layer import simple_sums
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.sums import (
    ABSENT,
    ExpSums,
    banded_sums,
    block_count,
    causal_banded_sums,
    causal_block_size,
)
from effexport.plugins.aft_window_attention.op import aft_window_attention

# Block sizes: small blocks waste little of the window, large ones keep the window to a few blocks.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 512
MOST_CAUSAL_BLOCKS = 8


class AFTLocalAttention(AFTPositionLayer):
    """AFT-full with biases for near pairs only: w_tt' = 0 for |t − t'| ≥ window.

    Every query still sees every key. Queries go in blocks: the keys of neighbouring blocks by a matrix
    product, all others by their block sums, which need no bias. The causal form sums over t' ≤ t. O(seq ·
    window · dim) time; O(seq · (dim + window)) memory. Exact while, for a query, the largest visible k +
    w near it is within 80 of max k + max w there.
    """

    spec: AFTLocalSpec

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        if not self.fused:
            return super().mix(projected, keep)
        query, key, value = projected
        self.check_length(keep.shape[1])
        if self.spec.seq_len == 1 and not isinstance(keep.shape[1], int):
            # the fused operator would take the biases of the one position for those of all
            raise SpecError(
                "aft-local has learned position biases for 1 token, but it is exported for any number of tokens; "
                "export it for a fixed length of 1, or train a layer with a seq_len of 2 or more"
            )
        fused: Tensor = aft_window_attention(
            query, key, value, keep, self.biases_by_offset(keep.shape[1]), self.spec.causal
        )
        return fused

    def sums(self, keys: ExpSums) -> ExpSums:
        causal, window = self.spec.causal, self.spec.window
        if window == 0:
            return simple_sums(keys, causal)
        seq_len = keys.m.shape[-2]
        size = banded_block_size(window - 1, causal)
        reach = block_count(window - 1, size)
        if causal:
            return causal_banded_sums(keys, self.band(seq_len, size, reach, 0), reach)
        return banded_sums(keys, self.band(seq_len, size, reach, reach), reach)

    def band(self, seq_len: int, size: int, before: int, after: int) -> Tensor:
        """Biases near the diagonal: [1, blocks, size, (before + 1 + after) · size]; ABSENT past the ends."""
        blocks = block_count(seq_len, size)
        bias = self.biases_of_blocks(seq_len, size, before, after)[:blocks]

        offset = band_offsets(size, before, after, bias.device)
        bias = torch.where(offset.abs() < self.spec.window, bias, 0.0)
        start = size * (torch.arange(blocks, device=bias.device) - before)[:, None, None]
        key_position = start + torch.arange(bias.shape[2], device=bias.device)
        # compared with a tensor: ONNX Runtime computes a number on the CPU, and would copy it to a GPU in every run
        last = torch.arange(seq_len, device=key_position.device)[-1]
        exists = (key_position >= 0) & (key_position <= last)
        return torch.where(exists, bias, ABSENT).unsqueeze(0)

    def biases_of_blocks(self, seq_len: int, size: int, before: int, after: int) -> Tensor:
        """w of blocks and their neighbours: [blocks or more, size, (before + 1 + after) · size]; 0 past the ends."""
        if not self.is_factored:
            return near_diagonal(self.padded_biases(seq_len, size), size, before, after)
        u, v = self.position_factors(seq_len, size)
        count = u.shape[0]
        extended = F.pad(v, (0, 0, 0, 0, before, after))
        near = torch.cat([extended[i : count + i] for i in range(before + 1 + after)], dim=1)
        return u @ near.transpose(-1, -2)

    def biases_by_offset(self, seq_len: int) -> Tensor:
        """The fused operator's biases: float32 [1, positions, taps], those of each query by offset.

        Of a symbolic length, those of all positions; they depend on parameters only, so that a runtime can fold them.
        """
        causal, reach = self.spec.causal, max(self.spec.window - 1, 0)
        taps = reach + 1 if causal else 2 * reach + 1
        if self.spec.window == 0:
            return self.out.weight.new_zeros(1, 1, taps, dtype=torch.float32)
        size = banded_block_size(reach, causal=False)
        neighbours = block_count(reach, size)
        bias = self.biases_of_blocks(seq_len, size, neighbours, 0 if causal else neighbours)
        first, width = neighbours * size - reach, size - 1 + taps
        by_offset = later_columns(bias[..., first : first + width], 1)[..., :taps].flatten(0, 1)
        positions = seq_len if isinstance(seq_len, int) else self.spec.seq_len
        return by_offset[:positions].float().unsqueeze(0)


def banded_block_size(reach: int, causal: bool) -> int:
    """Tokens per block for biases up to `reach` tokens away."""
    if causal:
        return causal_block_size(reach, MOST_CAUSAL_BLOCKS)
    size = SMALLEST_BLOCK
    while size < min(reach, LARGEST_BLOCK):
        size *= 2
    return size


def band_offsets(size: int, before: int, after: int, device: torch.device) -> Tensor:
    """t' − t of each query and key of a block's window: int64 [size, (before + 1 + after) · size]."""
    query = torch.arange(size, device=device)[:, None] + before * size
    return torch.arange((before + 1 + after) * size, device=device)[None, :] - query


def bias_local(layer: AFTLocalAttention, seq_len: int) -> Tensor:
    """The w of AFT-full where |t − t'| < window, 0 elsewhere: float64 [1, seq, seq]."""
    positions = torch.arange(seq_len)
    near = (positions[:, None] - positions).abs() < layer.spec.window
    return bias_full(layer, seq_len) * near


def exact(layer: AFTLocalAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_local(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTLocalSpec(position_dim=8, window=0),
    small={"position_dim": 8, "window": 8},
    forms={
        "full biases": {"position_bias": "full"},
        "no window": {"window": 0},
        "own position": {"window": 1},
        "a long window": {"window": 90},
        "wide heads": {"head_dim": 16},
    },
)
