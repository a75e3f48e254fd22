"""Linear attention (Katharopoulos et al., 2020, arXiv 2006.16236, eq. 4 to 12)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import (
    MASKED_LOGIT,
    MultiHeadAttention,
    State,
    at_least_float32,
    causal_mask,
    merge_heads,
    split_heads,
)
from effexport.models.validation import require
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.linear import LinearSpec
from effexport.plugins.linear_attention.op import linear_attention as fused_linear_attention


class LinearAttention(MultiHeadAttention):
    """out_i = φ(q_i)ᵀ S / (φ(q_i)·z + eps), S = Σ_j φ(k_j) v_jᵀ, z = Σ_j φ(k_j), with φ(x) = elu(x) + 1 or another.

    There is no 1/√d. The causal form sums over j ≤ i. O(seq · dim · head_dim) time, O(seq · dim) memory.
    Everything after the projections runs in float32: in half precision the denominator overflows near seq 1000.
    """

    spec: LinearSpec

    @property
    def calls_fused(self) -> bool:
        return self.fused and self.spec.has_fused_operator

    @property
    def does_without_mask(self) -> bool:
        return not self.calls_fused

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor | None) -> Tensor:
        spec = self.spec
        if self.calls_fused:
            assert keep is not None
            relu = spec.feature_map == "relu"
            fused: Tensor = fused_linear_attention(*projected, keep, spec.eps, spec.causal, spec.chunk_length, relu)
            return fused
        q, k, v = (at_least_float32(x) for x in projected)
        q, k = self.query_features(q), self.key_features(k, keep)
        if keep is not None:  # of φ(k), not k: φ(0) is 1
            k = k * keep[:, None, :, None].to(k.dtype)
        if spec.causal:
            sums = causal_sums(q, k, v, spec.chunk_length, spec.blindspot)
            context = self.normalized(sums[..., :-1], sums[..., -1:])
        else:
            context = self.normalized(*total_sums(q, k, v))
        return context.to(projected[0].dtype)

    def query_features(self, q: Tensor) -> Tensor:
        """φ(q), of the shape of q."""
        if self.spec.feature_map == "softmax":
            return torch.softmax(q, dim=-1) / math.sqrt(self.spec.head_size)
        return ELEMENTWISE[self.spec.feature_map](q)

    def key_features(self, k: Tensor, keep: Tensor | None = None) -> Tensor:
        """φ(k), of the shape of k. Tokens where `keep`, boolean [batch, seq], is False get any finite number."""
        name = self.spec.feature_map
        if name in ("exp", "softmax") and keep is not None:
            # e^k of padding may overflow, and infinity · 0 is not a number
            k = torch.where(keep[:, None, :, None], k, MASKED_LOGIT)
        if name == "softmax":
            return torch.exp(k) if self.spec.causal else softmax_of_tokens(k)
        return ELEMENTWISE[name](k)

    def normalized(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """The result for the sums φ(q)ᵀ S [..., head_dim] and φ(q)·z [..., 1]."""
        spec = self.spec
        if not spec.normalizer:
            return numerator
        denominator = denominator + spec.eps
        return numerator / (denominator.clamp(min=spec.min_denominator) if spec.min_denominator else denominator)

    def initial_state(self, batch: int) -> State:
        """The state before the first token: S [batch, heads, head_dim, head_dim] and z [batch, heads, head_dim].

        Raises SpecError for a blindspot: its state would also hold the tokens of a block.
        """
        spec = self.spec
        require(spec.blindspot == 1, f"blindspot {spec.blindspot} has no decode step; use blindspot 1")
        heads, size, device = spec.heads, spec.head_size, self.out.weight.device
        return {
            "s": torch.zeros(batch, heads, size, size, device=device),
            "z": torch.zeros(batch, heads, size, device=device),
        }

    def step(self, hidden_states: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of the causal form: hidden_states [batch, 1, dim] → [batch, 1, dim] and the next state."""
        heads = self.spec.heads
        q = self.query_features(split_heads(self.query(hidden_states), heads).float())
        k = self.key_features(split_heads(self.key(hidden_states), heads).float())
        v = split_heads(self.value(hidden_states), heads).float()
        s = state["s"] + k.transpose(-1, -2) @ v
        z = state["z"] + k.squeeze(2)
        context = self.normalized(q @ s, q @ z.unsqueeze(-1))
        return self.out(merge_heads(context).to(hidden_states.dtype)), {"s": s, "z": z}

    def prefill(self, hidden_states: Tensor, keep: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v = (x.float() for x in self.project(hidden_states))
        visible = keep[:, None, :, None]
        q = self.query_features(q)
        k, v = torch.where(visible, self.key_features(k, keep), 0.0), torch.where(visible, v, 0.0)
        sums = causal_sums(q, k, v, self.spec.chunk_length)
        # what the earlier tokens add to the numerator and the denominator
        numerator = sums[..., :-1] + q @ state["s"]
        denominator = sums[..., -1:] + q @ state["z"].unsqueeze(-1)
        context = merge_heads(self.normalized(numerator, denominator)).to(hidden_states.dtype)
        return self.out(context), {"s": state["s"] + k.transpose(-1, -2) @ v, "z": state["z"] + k.sum(dim=-2)}


def feature_map(x: Tensor) -> Tensor:
    """elu(x) + 1, written so that it does not round to zero for x below -18 (float32) or -9 (float16)."""
    return torch.where(x > 0, x + 1, torch.exp(torch.clamp(x, max=0)))


def softmax_of_tokens(k: Tensor) -> Tensor:
    """softmax over tokens, [..., seq, channels], on the last axis: of others, ONNX Runtime takes ten times as long."""
    return torch.softmax(k.transpose(-1, -2), dim=-1).transpose(-1, -2)


# By the names of `LinearSpec.feature_map`.
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {"elu": feature_map, "relu": torch.relu, "exp": torch.exp}


def total_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q_iᵀ Σ_j k_j v_jᵀ, of the shape of v, and q_i·Σ_j k_j, [batch, heads, seq, 1].

    q, k: mapped features, k masked, [batch, heads, seq, head_dim]; v likewise.
    """
    s = k.transpose(-1, -2) @ v
    z = k.sum(dim=-2).unsqueeze(-1)
    return q @ s, q @ z


def causal_sums(q: Tensor, k: Tensor, v: Tensor, chunk_length: int, blindspot: int = 1) -> Tensor:
    """q_iᵀ Σ_j≤i k_j v_jᵀ and, as one more channel, q_i·Σ_j≤i k_j: [batch, heads, seq, head_dim + 1].

    Exact, block by block: triangular products inside a block, prefix sums between blocks. No loop, and no state per
    token. blindspot: a divisor of chunk_length; above 1, the sums end before the block of this many tokens that has i.
    """
    seq_len, head_dim = q.shape[2], v.shape[-1]
    blocks = (seq_len + chunk_length - 1) // chunk_length
    pad = blocks * chunk_length - seq_len
    # a column of ones under v makes the denominator one more channel of the same products
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, chunk_length)) for x in (q, k, v))
    seen = causal_mask(chunk_length, q.device)
    if blindspot > 1:
        block = torch.arange(chunk_length, device=q.device) // blindspot
        seen = block[:, None] > block[None, :]
    inside = (q @ k.transpose(-1, -2)) * seen.to(q.dtype)
    block_states = (k.transpose(-1, -2) @ v).flatten(-2)
    earlier = causal_mask(blocks, q.device) & ~torch.eye(blocks, dtype=torch.bool, device=q.device)
    before = (earlier.to(q.dtype) @ block_states).unflatten(-1, (q.shape[-1], head_dim + 1))
    # narrow, not a slice: a slice gives the exported graph a length of min(seq, …)
    return torch.flatten(inside @ v + q @ before, 2, 3).narrow(2, 0, seq_len)


def features(x: Tensor) -> Tensor:
    """elu(x) + 1 in float64."""
    return torch.where(x > 0, x + 1, x.exp())


def mapped(layer: LinearAttention, q: Tensor, k: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) by the formulas in the docstring of `LinearSpec`, 0 for hidden keys."""
    spec, visible = layer.spec, keep[:, None, :, None]
    if spec.feature_map == "softmax":
        weights = k.exp() * visible
        if not spec.causal:
            weights = weights / weights.sum(dim=2, keepdim=True)
        return torch.softmax(q, dim=-1) / spec.head_size**0.5, weights
    maps: dict[str, Callable[[Tensor], Tensor]] = {"elu": features, "relu": lambda x: x.clamp(min=0), "exp": torch.exp}
    return maps[spec.feature_map](q), maps[spec.feature_map](k) * visible


@torch.no_grad()
def exact(layer: LinearAttention, x: Tensor, keep: Tensor) -> Tensor:
    """The explicit matrix φ(q_i)·φ(k_j) m_j, its rows divided by their sums plus eps, for all options, in float64."""
    spec = layer.spec
    q, k, v = (
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        for p in (layer.query, layer.key, layer.value)
    )
    q, k = mapped(layer, q, k, keep)
    matrix = q @ k.transpose(-1, -2)
    if spec.blindspot > 1:
        block = torch.arange(x.shape[1]) // spec.blindspot
        matrix = matrix * (block[:, None] > block[None, :])
    elif spec.causal:
        matrix = matrix.tril()
    if spec.normalizer:
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + spec.eps).clamp(min=spec.min_denominator)
    out: Tensor = matrix @ v
    return out.transpose(1, 2).flatten(-2)


CONTRACT = VariantContract(
    exact=exact,
    limit=3e-6,
    hides_nan=False,
    reason="sums of positive terms lose nothing by cancellation: some roundings of 6e-8; 9e-7 was measured",
    changed=LinearSpec(dim=96, heads=3, seq_len=63, causal=True, eps=1e-5, chunk_length=16),
    small={"chunk_length": 16},
    forms={
        "relu": {"feature_map": "relu"},
        "exp": {"feature_map": "exp"},
        "softmax": {"feature_map": "softmax"},
        "no denominator": {"normalizer": False},
        "large denominator": {"min_denominator": 20.0},
        "softmax without a denominator": {"feature_map": "softmax", "normalizer": False, "causal": False},
        "softmax and a small denominator": {"feature_map": "softmax", "eps": 0.0, "min_denominator": 1e-3},
        "blindspot": {"feature_map": "softmax", "min_denominator": 1e-3, "blindspot": 4, "causal": True},
        "long chunks": {"chunk_length": 200},
        "chunks of one": {"chunk_length": 1},
    },
)
