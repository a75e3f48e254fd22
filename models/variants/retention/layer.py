"""Retention (Sun et al., 2023, arXiv 2307.08621, eq. 6 to 8)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import at_least_float32, rotary_angles, rotate_pairs
from effexport.models.variants.contract import VariantContract
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


@torch.no_grad()
def exact(layer: Retention, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token, in float64; rotations as complex numbers."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    q, k, v, g = (
        linear(x).unflatten(-1, (spec.heads, -1)) for linear in (layer.query, layer.key, layer.value, layer.gate)
    )
    if spec.rotary:
        frequencies = 10000.0 ** (-torch.arange(0, spec.head_size, 2).double() / spec.head_size)
        angles = torch.arange(x.shape[1]).double()[:, None, None] * frequencies
        turns = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for y in (q, k)
        )
    gamma = 1 - 2.0 ** (-5 - torch.arange(spec.heads).double())
    state = torch.zeros(len(x), spec.heads, spec.head_size, spec.value_size, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        following = gamma[:, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        state = torch.where(keep[:, t, None, None, None], following, state)
        read = torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / spec.head_size**0.5
        variance = read.var(dim=-1, unbiased=False, keepdim=True)
        normed = (read - read.mean(dim=-1, keepdim=True)) / (variance + spec.norm_eps).sqrt()
        outputs.append((normed.flatten(1) * layer.norm.weight + layer.norm.bias) * F.silu(g[:, t].flatten(1)))
    return torch.stack(outputs, dim=1)


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-4,
    empty_is_zero=False,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel: 1e-7 each, and 6e-6 of an angle of 100 in float32; 4e-5 was measured with rotary positions",
    changed=RetentionSpec(dim=96, heads=3, seq_len=63, value_dim=64, chunk_length=16, bias=False, norm_eps=1e-6),
    small={"chunk_length": 8},
    forms={"rotary": {"rotary": True}, "long chunks": {"chunk_length": 200, "value_dim": 5}},
)
