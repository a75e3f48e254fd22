"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import at_least_float32
from effexport.models.variants.delta.layer import DeltaAttention
from effexport.models.variants.gated_delta import GatedDeltaSpec
from effexport.models.variants.recurrence import Tokens


class GatedDeltaAttention(DeltaAttention):
    """S_t = α_t S_{t−1} + β_t k_t (v_t − (α_t S_{t−1})ᵀ k_t)ᵀ, out_t = norm(S_tᵀ q_t / √d) · SiLU(g(x)).

    α = exp(−e^A softplus(a(x) + dt)); all else as in `DeltaAttention`. As in section 3.4 of the paper,
    flash-linear-attention's GatedDeltaNet and Qwen3-Next.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {
        **DeltaAttention.IN_FLOAT,
        "decay": "a number for each head, which decides how long a state lasts",
    }

    spec: GatedDeltaSpec

    def __init__(self, spec: GatedDeltaSpec) -> None:
        super().__init__(spec)
        self.decay = nn.Linear(spec.dim, spec.heads, bias=False)
        # as published: e^A of 1 to 16, and softplus(dt) of 0.001 to 0.1
        self.a_log = nn.Parameter(torch.empty(spec.heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.empty(spec.heads).uniform_(-6.9, -2.3).exp().expm1().log())

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (*super().projections(hidden_states), self.decay(hidden_states).unsqueeze(-1))

    def tokens(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tokens:
        beta, decay = others
        rate, bias = (at_least_float32(x)[:, None] for x in (self.a_log, self.dt_bias))
        return super().tokens(query, key, value, beta)._replace(decay=-rate.exp() * F.softplus(decay + bias))
