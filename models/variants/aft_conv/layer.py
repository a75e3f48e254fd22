"""AFT-conv: biases that depend on the offset only (Zhai et al., 2021, arXiv 2105.14103, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effexport.models.layers import at_least_float32
from effexport.models.variants.aft.layer import AFTLayer, gated_sums
from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_local.layer import band_offsets, banded_block_size
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.sums import ExpSums, banded_sums, block_count, causal_banded_sums
from effexport.plugins.aft_window_attention.op import aft_window_attention


class AFTConvAttention(AFTLayer):
    """out_t = σ(q_t) ⊙ Σ_t' e^(k_t' + w_(t'−t)) v_t' / Σ_t' e^(k_t' + w_(t'−t)).

    Each head has one key channel. w has `kernel_size` taps, centred; it is 0 for larger offsets, so every
    query still sees every key. The causal form sums over t' ≤ t. Per head w = γ · (weight − mean) / std +
    β, with γ = β = 0 at first: AFT-simple. The paper's convolution with e^w − 1 is the same sum, but
    cancels where w is very negative; this runs the block sums of AFT-local. O(seq · kernel_size · dim)
    time, O(seq · dim) memory. Exact while the taps differ by at most 80 from each other and from 0.
    """

    spec: AFTConvSpec

    def __init__(self, spec: AFTConvSpec) -> None:
        super().__init__(spec, spec.inner_dim, heads=spec.heads, key_dim=spec.heads)
        self.weight = nn.Parameter(torch.randn(spec.heads, spec.kernel_size))
        self.gamma = nn.Parameter(torch.zeros(spec.heads))
        self.beta = nn.Parameter(torch.zeros(spec.heads))

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        if not self.fused:
            return super().mix(projected, keep)
        query, key, value = projected
        taps = self.taps()[:, : self.spec.kernel_size // 2 + 1] if self.spec.causal else self.taps()
        fused: Tensor = aft_window_attention(query, key, value, keep, taps.float().unsqueeze(1), self.spec.causal)
        return fused

    def sums(self, keys: ExpSums) -> ExpSums:
        causal, half = self.spec.causal, self.spec.kernel_size // 2
        size = banded_block_size(half, causal)
        reach = block_count(half, size)
        if causal:
            return causal_banded_sums(keys, self.band(size, reach, 0), reach)
        return banded_sums(keys, self.band(size, reach, reach), reach)

    def taps(self) -> Tensor:
        """w, float32 [heads, kernel_size]; tap i is the bias of the key at offset i − kernel_size // 2."""
        weight = at_least_float32(self.weight)
        centred = weight - weight.mean(dim=1, keepdim=True)
        # the biased variance: defined for a single tap too
        std = torch.sqrt(centred.square().mean(dim=1, keepdim=True) + self.spec.std_eps**2)
        return at_least_float32(self.gamma)[:, None] * centred / std + at_least_float32(self.beta)[:, None]

    def band(self, size: int, before: int, after: int) -> Tensor:
        """Biases of a block, the same for every block: [heads, 1, size, (before + 1 + after) · size]."""
        half = self.spec.kernel_size // 2
        offset = band_offsets(size, before, after, self.weight.device)
        near = self.taps()[:, (offset + half).clamp(0, 2 * half)]
        return torch.where(offset.abs() <= half, near, 0.0).unsqueeze(1)


def bias_conv(layer: AFTConvAttention, seq_len: int) -> Tensor:
    """The re-parameterised tap of every offset t' − t, 0 outside the filter: float64 [heads, seq, seq]."""
    weight, half = layer.weight.detach().double(), layer.spec.kernel_size // 2
    variance = weight.var(dim=1, keepdim=True, unbiased=False)
    taps = (weight - weight.mean(dim=1, keepdim=True)) / torch.sqrt(variance + layer.spec.std_eps**2)
    taps = layer.gamma.detach().double()[:, None] * taps + layer.beta.detach().double()[:, None]
    w = torch.zeros(layer.spec.heads, seq_len, seq_len, dtype=torch.float64)
    for tap in range(layer.spec.kernel_size):
        if abs(tap - half) < seq_len:
            w.diagonal(tap - half, 1, 2)[:] = taps[:, tap, None]
    return w


def exact(layer: AFTConvAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_conv(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTConvSpec(kernel_size=5, std_eps=1e-3),
    small={"kernel_size": 5},
    forms={"one tap": {"kernel_size": 1}, "a long filter": {"kernel_size": 145}, "wide heads": {"head_dim": 16}},
)
