"""Mamba-2's state-space layer (Dao and Gu, 2024, arXiv 2405.21060, section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import at_least_float32
from effexport.models.variants.mamba2 import Mamba2Spec
from effexport.models.variants.recurrence import RecurrentAttention, RMSNorm, Tokens


class Mamba2(RecurrentAttention):
    """S_t = exp(−Δ_t e^A) S_{t−1} + Δ_t b_t x_tᵀ, out_t = norm((S_tᵀ c_t + D x_t) · SiLU(z_t)).

    c, b and x, called query, key and value, are convolved with a bias and activated by SiLU. Δ = softplus(dt + dt_bias)
    is a number for each head and token; A and D are one for each head. The heads of a group are normalised together,
    as in the authors' code.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {
        **RecurrentAttention.IN_FLOAT,
        "dt": "a number for each head, which decides how long a state lasts",
    }

    spec: Mamba2Spec

    def __init__(self, spec: Mamba2Spec) -> None:
        super().__init__(spec)
        self.norm = RMSNorm(spec.heads * spec.value_size, spec.norm_eps, spec.groups)
        self.taps_bias = nn.Parameter(torch.zeros(spec.convolved))
        self.dt = nn.Linear(spec.dim, spec.heads, bias=False)
        # as published: softplus(dt_bias) of 0.001 to 0.1, and e^A of 1 to 16
        self.dt_bias = nn.Parameter(torch.empty(spec.heads).uniform_(-6.9, -2.3).exp().expm1().log())
        self.a_log = nn.Parameter(torch.empty(spec.heads).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(spec.heads))

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """All channels as one head."""
        return tuple(linear(hidden_states).unsqueeze(2) for linear in (self.query, self.key, self.value, self.dt))

    def conv_bias(self) -> Tensor:
        return self.taps_bias

    def tokens(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tokens:
        bias, a_log = (at_least_float32(x)[:, None] for x in (self.dt_bias, self.a_log))
        step = F.softplus(others[0].transpose(2, 3) + bias)
        own = value.squeeze(2).unflatten(-1, (self.spec.heads, -1))
        return Tokens(self.for_heads(query), self.for_heads(key), own, -a_log.exp() * step, step)

    def for_heads(self, shared: Tensor) -> Tensor:
        """Queries or keys [batch, seq, 1, groups · head_dim] → [batch, seq, heads, head_dim]."""
        groups, heads = self.spec.groups, self.spec.heads
        by_group = torch.unflatten(shared.squeeze(2), -1, (groups, 1, -1))
        return by_group.expand(-1, -1, -1, heads // groups, -1).flatten(2, 3)

    def results(self, context: Tensor, tokens: Tokens) -> Tensor:
        """All channels as one head."""
        return (context + at_least_float32(self.skip)[:, None] * tokens.value).flatten(2).unsqueeze(2)

    def finish(self, context: Tensor, hidden_states: Tensor) -> Tensor:
        normed: Tensor = self.norm(context.squeeze(2) * self.swish(hidden_states))
        return normed
