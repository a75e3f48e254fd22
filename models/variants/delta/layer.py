"""Linear attention by the delta rule (Yang et al., 2024, arXiv 2406.06484)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.variants.delta import DeltaSpec
from effexport.models.variants.recurrence import RecurrentAttention, Tokens


class DeltaAttention(RecurrentAttention):
    """S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ, out_t = norm(S_tᵀ q_t / √d), with β = σ(b(x)).

    q, k and v are convolved and activated by SiLU; q and k get the length 1. As in flash-linear-attention's DeltaNet.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {
        **RecurrentAttention.IN_FLOAT,
        "beta": "a number for each head, which decides what a state keeps",
    }

    spec: DeltaSpec

    def __init__(self, spec: DeltaSpec) -> None:
        super().__init__(spec)
        self.beta = nn.Linear(spec.dim, spec.heads, bias=False)

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (*super().projections(hidden_states), self.beta(hidden_states).unsqueeze(-1))

    def tokens(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tokens:
        beta = torch.sigmoid(others[0])
        if not self.spec.conv_size:
            query, key, value = F.silu(query), F.silu(key), F.silu(value)
        return Tokens(unit_length(query), unit_length(key), value, torch.zeros_like(beta), beta)


def unit_length(x: Tensor) -> Tensor:
    """x / √(Σ x² + 1e-6) over the last axis, as flash-linear-attention and Qwen3-Next normalise queries and keys."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
