"""What the attention-free transformers share (Zhai et al., 2021, arXiv 2105.14103)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.exp_sums import ExpSums, average, block_count, sums_of_tokens
from effexport.models.layers import AttentionLayer, at_least_float32, split_heads
from effexport.models.spec import AFTPositionSpec, AttentionSpec
from effexport.models.validation import SpecError


class AFTLayer(AttentionLayer):
    """out_t = σ(q_t) ⊙ Σ_t' e^(k_t' + w_tt') ⊙ v_t' / Σ_t' e^(k_t' + w_tt'), elementwise over channels.

    A subclass implements `sums`, the two sums. They and their quotient are float32 whatever the model's
    dtype: in float16 two keys 17 apart already give 0 / 0. A row that sees no key gets 0.
    """

    def __init__(self, spec: AttentionSpec, inner_dim: int, heads: int, key_dim: int) -> None:
        super().__init__(spec, inner_dim)
        self.heads = heads
        self.query = nn.Linear(spec.dim, inner_dim, bias=spec.bias)
        self.key = nn.Linear(spec.dim, key_dim, bias=spec.bias)
        self.value = nn.Linear(spec.dim, inner_dim, bias=spec.bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, each [batch, heads, seq, channels]; a key may have a single channel."""
        layers = (self.query, self.key, self.value)
        return tuple(split_heads(layer(hidden_states), self.heads) for layer in layers)

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        query, key, value = projected
        context = average(self.sums(sums_of_tokens(key, value, keep)))
        return torch.sigmoid(query) * context.to(query.dtype)

    def sums(self, keys: ExpSums) -> ExpSums:
        """The sums of each query, [batch, heads, seq, channels]; seq is 1 where all queries see the same."""
        raise NotImplementedError


class AFTPositionLayer(AFTLayer):
    """An AFT with a learned bias for every pair of positions, of low rank: w = u vᵀ.

    position_query u and position_key v are [seq_len, position_dim].
    """

    spec: AFTPositionSpec

    def __init__(self, spec: AFTPositionSpec) -> None:
        super().__init__(spec, spec.inner_dim, heads=1, key_dim=spec.inner_dim)
        self.position_query = nn.Parameter(torch.empty(spec.seq_len, spec.position_dim))
        self.position_key = nn.Parameter(torch.empty(spec.seq_len, spec.position_dim))
        # the paper draws them from N(0, 10⁻²)
        nn.init.normal_(self.position_query, std=0.01)
        nn.init.normal_(self.position_key, std=0.01)

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        self.check_length(keep.shape[1])
        return super().mix(projected, keep)

    def check_length(self, seq_len: int | torch.SymInt) -> None:
        """A symbolic length is not checked: that would tie an exported graph to the length of its example."""
        if isinstance(seq_len, int) and seq_len > self.spec.seq_len:
            raise SpecError(
                f"the sequence has {seq_len} tokens, but {self.spec.variant} has learned position biases for "
                f"{self.spec.seq_len}; shorten the input, or train a layer with seq_len {seq_len}"
            )

    def position_factors(self, seq_len: int | torch.SymInt, size: int) -> tuple[Tensor, Tensor]:
        """u and v in float32, zero-padded to whole blocks: [blocks, size, position_dim] each.

        For a symbolic length these are the blocks of all positions: what is computed from them depends on
        parameters only, so that a runtime can fold it, and is sliced to the length afterwards.
        """
        if isinstance(seq_len, int):
            rows, blocks = seq_len, block_count(seq_len, size)
        else:
            # as many blocks as the longest sequence has, with the spare block of `block_count`
            rows, blocks = self.spec.seq_len, block_count(self.spec.seq_len, size) + 1
        u, v = (
            torch.unflatten(F.pad(at_least_float32(x[:rows]), (0, 0, 0, blocks * size - rows)), 0, (blocks, size))
            for x in (self.position_query, self.position_key)
        )
        return u, v
