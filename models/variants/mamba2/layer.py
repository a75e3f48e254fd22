"""Mamba-2's state-space layer (Dao and Gu, 2024, arXiv 2405.21060, section 7)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import at_least_float32
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.delta.layer import convolved
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


@torch.no_grad()
def exact(layer: Mamba2, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token and head by head, in float64: convolution, recurrence, gate and normalisation."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    inputs = torch.cat([linear(x) for linear in (layer.query, layer.key, layer.value)], dim=-1)
    sums = torch.stack([convolved(own, kept, layer.taps) for own, kept in zip(inputs, keep, strict=True)])
    step, gate = F.softplus(layer.dt(x) + layer.dt_bias), F.silu(layer.gate(x))
    state = torch.zeros(len(x), spec.heads, spec.head_size, spec.value_size, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        widths = [spec.key_width, spec.key_width, spec.heads * spec.value_size]
        c, b, v = F.silu(sums[:, t] + layer.taps_bias).split(widths, dim=-1)
        c, b = (y.unflatten(-1, (spec.groups, -1)) for y in (c, b))
        v = v.unflatten(-1, (spec.heads, -1))
        read = torch.zeros_like(v)
        for head in range(spec.heads):
            group = head * spec.groups // spec.heads
            delta = step[:, t, head, None, None]
            kept = torch.exp(-delta * layer.a_log[head].exp()) * state[:, head]
            following = kept + delta * b[:, group, :, None] * v[:, head, None, :]
            state[:, head] = torch.where(keep[:, t, None, None], following, state[:, head])
            read[:, head] = (c[:, group, None] @ state[:, head]).squeeze(1) + layer.skip[head] * v[:, head]
        gated = (read.flatten(1) * gate[:, t]).unflatten(-1, (spec.groups, -1))
        mean = gated.square().mean(-1, keepdim=True)
        outputs.append((gated / (mean + spec.norm_eps).sqrt()).flatten(1) * layer.norm.weight)
    return torch.stack(outputs, dim=1)


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 9e-6 was measured",
    changed=Mamba2Spec(dim=96, heads=6, seq_len=63, head_dim=8, value_dim=32, conv_size=2, groups=2, norm_eps=1e-6),
    small={"chunk_length": 8, "groups": 2},
    forms={
        "one group": {"groups": 1},
        "a group for each head": {"groups": 4, "conv_size": 2},
        "wide heads": {"value_dim": 16, "head_dim": 5, "chunk_length": 200},
    },
)
