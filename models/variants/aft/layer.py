"""Shared layers of the attention-free transformers (Zhai et al., 2021, arXiv 2105.14103)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import linear

from effexport.models.attention_spec import AttentionSpec
from effexport.models.layers import AttentionLayer, at_least_float32, split_heads
from effexport.models.validation import SpecError
from effexport.models.variants.aft import AFTPositionSpec
from effexport.models.variants.sums import ExpSums, average, block_count, sums_of_tokens


class AFTLayer(AttentionLayer):
    """out_t = σ(q_t) ⊙ Σ_t' e^(k_t' + w_tt') ⊙ v_t' / Σ_t' e^(k_t' + w_tt'), elementwise over channels.

    A subclass implements `sums`, the two sums. They and their quotient are float32 whatever the model's
    dtype: in float16 two keys 17 apart already give 0 / 0. A row that sees no key gets 0.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {"": "its sums of exponentials span many magnitudes"}

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
        return self.mixed(projected, keep)

    def mixed(self, projected: tuple[Tensor, ...], keep: Tensor | None) -> Tensor:
        """`mix`, also without a mask where `sums` does without one."""
        query, key, value = projected
        context = average(self.sums(sums_of_tokens(key, value, keep)))
        return torch.sigmoid(query) * context.to(query.dtype)

    def sums(self, keys: ExpSums) -> ExpSums:
        """The sums of each query, [batch, heads, seq, channels]; seq is 1 where all queries see the same."""
        raise NotImplementedError


class AFTPositionLayer(AFTLayer):
    """An AFT with a learned bias w for every pair of positions.

    A factored w is u vᵀ, with position_query u and position_key v, [seq_len, position_dim] each. Otherwise w is
    position_bias, [seq_len, seq_len].
    """

    spec: AFTPositionSpec

    def __init__(self, spec: AFTPositionSpec) -> None:
        super().__init__(spec, spec.inner_dim, heads=1, key_dim=spec.inner_dim)
        self.is_factored = spec.position_bias == "factored"
        if self.is_factored:
            self.position_query = nn.Parameter(torch.empty(spec.seq_len, spec.position_dim))
            self.position_key = nn.Parameter(torch.empty(spec.seq_len, spec.position_dim))
            # the paper draws them from N(0, 10⁻²)
            nn.init.normal_(self.position_query, std=0.01)
            nn.init.normal_(self.position_key, std=0.01)
        else:
            self.position_bias = nn.Parameter(torch.empty(spec.seq_len, spec.seq_len))
            nn.init.normal_(self.position_bias, std=0.01)

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
        rows, blocks = self.positions_and_blocks(seq_len, size)
        u, v = (
            torch.unflatten(F.pad(at_least_float32(x[:rows]), (0, 0, 0, blocks * size - rows)), 0, (blocks, size))
            for x in (self.position_query, self.position_key)
        )
        return u, v

    def padded_biases(self, seq_len: int | torch.SymInt, size: int) -> Tensor:
        """A full w in float32, zero-padded to whole blocks: [blocks · size, blocks · size].

        Of a symbolic length, that of all positions, as in `position_factors`.
        """
        rows, blocks = self.positions_and_blocks(seq_len, size)
        padding = blocks * size - rows
        return F.pad(at_least_float32(self.position_bias[:rows, :rows]), (0, padding, 0, padding))

    def positions_and_blocks(self, seq_len: int | torch.SymInt, size: int) -> tuple[int, int]:
        """The number of positions with biases in a graph for this length, and of blocks of `size` that cover them."""
        if isinstance(seq_len, int):
            return seq_len, block_count(seq_len, size)
        # as many blocks as the longest sequence has, with the spare block of `block_count`
        return self.spec.seq_len, block_count(self.spec.seq_len, size) + 1


def near_diagonal(w: Tensor, size: int, before: int, after: int) -> Tensor:
    """The biases of each block of queries for its own keys and those of its neighbours.

    w [blocks · size, blocks · size] → [blocks, size, (before + 1 + after) · size]; 0 past the ends.
    """
    wide = torch.unflatten(F.pad(w, (before * size, after * size)), 0, (-1, size))
    # block b begins b · size columns later
    near = later_columns(wide.transpose(0, 1), size)[..., : (before + 1 + after) * size]
    return near.transpose(0, 1)


def later_columns(x: Tensor, step: int) -> Tensor:
    """Row r begins r · step columns later: [..., rows, columns] → [..., rows, columns + step].

    A row that ends goes on with the next row, and the last one with zeros.
    """
    rows, columns = x.shape[-2:]
    # rows that are `step` elements longer move the columns below each other
    return torch.unflatten(F.pad(x.flatten(-2), (0, rows * step)), -1, (rows, columns + step))


@torch.no_grad()
def gated_sums(layer: AttentionLayer, x: Tensor, keep: Tensor, w: Tensor) -> Tensor:
    """x [batch, seq, dim], keep [batch, seq], w [heads, seq, seq] → float64 [batch, seq, inner], a query at a time."""
    x, heads = x.double(), w.shape[0]

    def projected(name: str) -> Tensor:
        projection = getattr(layer, name)
        return linear(x, projection.weight.double(), None if projection.bias is None else projection.bias.double())

    k, v = (projected(name).unflatten(-1, (heads, -1)) for name in ("key", "value"))
    context = torch.zeros_like(v)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            end = t + 1 if layer.spec.causal else x.shape[1]
            seen = keep[b, :end].nonzero().flatten()
            if len(seen):
                logits = k[b, seen] + w[:, t, seen].double().T[..., None]
                context[b, t] = (torch.softmax(logits, dim=0) * v[b, seen]).sum(dim=0)
    return torch.sigmoid(projected("query")) * context.flatten(-2)


def bias_full(layer: AFTPositionLayer, seq_len: int) -> Tensor:
    """w of the first positions, as it is or u vᵀ: float64 [1, seq, seq]."""
    if layer.spec.position_bias == "full":
        return layer.position_bias.detach().double()[None, :seq_len, :seq_len]
    u, v = layer.position_query.detach().double(), layer.position_key.detach().double()
    return (u @ v.T)[None, :seq_len, :seq_len]
