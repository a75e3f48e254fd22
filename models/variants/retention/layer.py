"""Retention (Sun et al., 2023, arXiv 2307.08621, eq. 6 to 8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effexport.models.layers import at_least_float32, rotary_angles, rotate_pairs
from effexport.models.variants.recurrence import RecurrentAttention, RMSNorm, Tokens, decay_of_heads
from effexport.models.variants.retention import RetentionSpec


class Retention(RecurrentAttention):
    """S_t = γ S_{t−1} + k_t v_tᵀ, out_t = norm(S_tᵀ q_t / √d) · SiLU(g(x)), with γ = 1 − 2^(−5−h) for head h.

    The normalisation subtracts the mean of a head and divides by its standard deviation, so the paper's other
    normalisations (section 2.2), which divide what a query reads by a number, change nothing but the part of eps.
    """

    spec: RetentionSpec

    def __init__(self, spec: RetentionSpec) -> None:
        super().__init__(spec)
        self.norm = GroupNorm(spec.heads * spec.value_size, spec.norm_eps, spec.heads)

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        query, key, value = super().projections(hidden_states)
        if self.spec.rotary:
            angles = rotary_angles(hidden_states.shape[1], self.spec.head_size, hidden_states.device)
            query, key = (rotate_pairs(x.transpose(1, 2), *angles).transpose(1, 2) for x in (query, key))
        return query, key, value

    def tokens(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tokens:
        beta = torch.ones_like(key[..., :1])
        return Tokens(query, key, value, decay_of_heads(beta), beta)


class GroupNorm(RMSNorm):
    """(x − mean x) / √(var x + eps) · weight + bias for each head, in float32 whatever the model's dtype."""

    def __init__(self, width: int, eps: float, groups: int) -> None:
        super().__init__(width, eps, groups)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, heads, channels] → [batch, seq, heads · channels], at least float32."""
        x = at_least_float32(x)
        centred = x - x.mean(dim=-1, keepdim=True)
        return super().forward(centred.flatten(2)) + at_least_float32(self.bias)
