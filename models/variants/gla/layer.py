"""Gated linear attention (Yang et al., 2023, arXiv 2312.06635, section 4.4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.variants.contract import VariantContract
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


@torch.no_grad()
def exact(layer: GatedLinearAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token, in float64: every row of the state has a decay of its own."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    projected = [linear(x) for linear in (layer.query, layer.key, layer.value, layer.gate)]
    projected.append(layer.decay_up(layer.decay_down(x)))
    q, k, v, g, logits = (y.unflatten(-1, (spec.heads, -1)) for y in projected)
    alpha = torch.sigmoid(logits) ** (1 / spec.gate_logit_normalizer)
    state = torch.zeros(len(x), spec.heads, spec.head_size, spec.value_size, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        following = alpha[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        state = torch.where(keep[:, t, None, None, None], following, state)
        read = torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / spec.head_size**0.5
        mean = read.square().mean(-1, keepdim=True)
        outputs.append(read / (mean + spec.norm_eps).sqrt() * layer.norm.weight * F.silu(g[:, t]))
    return torch.stack(outputs, dim=1).flatten(2)


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 1e-5 was measured",
    changed=GLASpec(dim=96, heads=3, seq_len=63, value_dim=24, gate_low_rank_dim=4, gate_logit_normalizer=2.0),
    small={"chunk_length": 8},
    forms={"fast decay": {"gate_logit_normalizer": 1.0}, "long chunks": {"chunk_length": 200, "value_dim": 5}},
)
