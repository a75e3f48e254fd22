"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import at_least_float32
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.delta.layer import DeltaAttention, by_token, projected
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


@torch.no_grad()
def exact(layer: GatedDeltaAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token, in float64."""
    rate, step = layer.a_log.double().exp(), F.softplus(projected(layer.decay, x) + layer.dt_bias.double())
    samples = zip(x, keep, -rate * step, strict=True)
    return torch.stack([by_token(layer, *sample) for sample in samples]) * F.silu(projected(layer.gate, x))


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 1.5e-5 was measured",
    changed=GatedDeltaSpec(dim=96, heads=3, seq_len=63, conv_size=2, value_dim=24, chunk_length=16, norm_eps=1e-6),
    small={"chunk_length": 8},
    forms={
        "no convolution": {"conv_size": 0},
        "two taps": {"conv_size": 2},
        "narrow values": {"value_dim": 5},
        "long chunks": {"chunk_length": 200},
        "chunks of one": {"chunk_length": 1},
    },
)
