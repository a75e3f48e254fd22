"""Gated linear attention (Yang et al., 2023, arXiv 2312.06635, section 4.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.variants.gla import GLASpec
from effexport.models.variants.recurrence import RecurrentAttention, Tokens


class GatedLinearAttention(RecurrentAttention):
    """S_t = diag(α_t) S_{t−1} + k_t v_tᵀ, out_t = norm(S_tᵀ q_t / √d) · SiLU(g(x)).

    α = σ(b + W_2 W_1 x)^(1/τ) is a decay for each channel of a key. As in flash-linear-attention's
    GatedLinearAttention.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {
        **RecurrentAttention.IN_FLOAT,
        "decay_down": "a few numbers for each token, which decide how long a state lasts",
        "decay_up": "they decide how long a state lasts",
    }

    spec: GLASpec

    def __init__(self, spec: GLASpec) -> None:
        super().__init__(spec)
        self.decay_down = nn.Linear(spec.dim, spec.gate_low_rank_dim, bias=False)
        self.decay_up = nn.Linear(spec.gate_low_rank_dim, spec.inner_dim)

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        decay: Tensor = self.decay_up(self.decay_down(hidden_states))
        return (*super().projections(hidden_states), decay.unflatten(-1, (self.spec.heads, -1)))

    def tokens(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tokens:
        # log σ(x) = −softplus(−x): the logarithm of a sigmoid that rounds to 0 is infinite
        decay = -F.softplus(-others[0]) / self.spec.gate_logit_normalizer
        return Tokens(query, key, value, decay, torch.ones_like(decay[..., :1]))
