"""Linear attention by the delta rule (Yang et al., 2024, arXiv 2406.06484)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.variants.contract import VariantContract
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


def projected(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    """x Wᵀ + b in float64."""
    product = x.double() @ layer.weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


def activated(layer: DeltaAttention, x: Tensor, keep: Tensor) -> list[Tensor]:
    """Queries, keys and values [seq, heads, channels] of one sample, x [seq, dim]: convolved tap by tap, then SiLU."""
    spec = layer.spec
    parts = [projected(linear, x) for linear in (layer.query, layer.key, layer.value)]
    inputs = torch.cat(parts, dim=1)
    if spec.conv_size:
        inputs = convolved(inputs, keep, layer.taps.double())
    widths = [part.shape[1] for part in parts]
    return [F.silu(part).unflatten(1, (spec.heads, -1)) for part in inputs.split(widths, dim=1)]


def convolved(x: Tensor, keep: Tensor, taps: Tensor) -> Tensor:
    """The causal convolution of the kept tokens of one sample, x [seq, channels]: hidden ones are as if not there."""
    mixed, kept = torch.zeros_like(x), keep.nonzero().flatten().tolist()
    for place, t in enumerate(kept):
        seen = kept[max(0, place + 1 - taps.shape[1]) : place + 1]
        for tap, source in zip(range(1, len(seen) + 1), reversed(seen), strict=True):  # the last tap is of t itself
            mixed[t] += taps[:, -tap] * x[source]
    return mixed


def by_token(layer: DeltaAttention, x: Tensor, keep: Tensor, decay: Tensor) -> Tensor:
    """The rule token by token, and the normalisation of results: x [seq, dim] of one sample → [seq, inner width].

    decay: its logarithms [seq, heads]. Hidden tokens neither decay nor write a state.
    """
    spec = layer.spec
    q, k, v = activated(layer, x, keep)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = torch.sigmoid(projected(layer.beta, x))
    state = torch.zeros(spec.heads, spec.head_size, spec.value_size, dtype=torch.float64)
    outputs = []
    for t in range(len(x)):
        if keep[t]:
            state = decay[t].exp()[:, None, None] * state
            held = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - held))
        read = torch.einsum("hkv,hk->hv", state, q[t]) / spec.head_size**0.5
        mean = read.square().mean(-1, keepdim=True)
        outputs.append((read / (mean + spec.norm_eps).sqrt() * layer.norm.weight.double()).flatten())
    return torch.stack(outputs)


@torch.no_grad()
def exact(layer: DeltaAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Token by token, in float64."""
    undiminished = torch.zeros(x.shape[1], layer.spec.heads, dtype=torch.float64)
    return torch.stack([by_token(layer, own, kept, undiminished) for own, kept in zip(x, keep, strict=True)])


CONTRACT = VariantContract(
    exact=exact,
    limit=5e-5,
    reason="results are divided by their own size, but by no less than √eps = 0.003, which magnifies the roundings of "
    "terms that cancel, of 1e-7 each; 1.5e-5 was measured",
    changed=DeltaSpec(dim=96, heads=3, seq_len=63, conv_size=0, chunk_length=16),
    small={"chunk_length": 8},
    forms={"no convolution": {"conv_size": 0}, "two taps": {"conv_size": 2}, "narrow values": {"value_dim": 5}},
)
