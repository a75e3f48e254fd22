"""Linear attention (Katharopoulos et al., 2020, arXiv 2006.16236, eq. 4 to 12)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import MultiHeadAttention, State, at_least_float32, causal_mask, merge_heads, split_heads
from effexport.models.spec import LinearSpec
from effexport.plugins.linear_attention.op import linear_attention as fused_linear_attention


class LinearAttention(MultiHeadAttention):
    """out_i = φ(q_i)ᵀ S / (φ(q_i)·z + eps) with φ(x) = elu(x) + 1, S = Σ_j φ(k_j) v_jᵀ, z = Σ_j φ(k_j).

    There is no 1/√d. The causal form sums over j ≤ i. O(seq · dim · head_dim) time, O(seq · dim) memory.
    Everything after the projections runs in float32: in half precision the denominator overflows near seq 1000.
    """

    spec: LinearSpec

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        if self.fused:
            spec = self.spec
            fused: Tensor = fused_linear_attention(*projected, keep, spec.eps, spec.causal, spec.chunk_length)
            return fused
        q, k, v = (at_least_float32(x) for x in projected)
        # the mask multiplies φ(k), not k: φ(0) is 1
        q, k = feature_map(q), feature_map(k) * keep[:, None, :, None].to(k.dtype)
        if self.spec.causal:
            context = causal_linear_attention(q, k, v, self.spec.eps, self.spec.chunk_length)
        else:
            context = linear_attention(q, k, v, self.spec.eps)
        return context.to(projected[0].dtype)

    def initial_state(self, batch: int) -> State:
        """The state before the first token: S [batch, heads, head_dim, head_dim] and z [batch, heads, head_dim]."""
        heads, size, device = self.spec.heads, self.spec.head_size, self.out.weight.device
        return {
            "s": torch.zeros(batch, heads, size, size, device=device),
            "z": torch.zeros(batch, heads, size, device=device),
        }

    def step(self, hidden_states: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of the causal form: hidden_states [batch, 1, dim] → [batch, 1, dim] and the next state."""
        heads = self.spec.heads
        q = feature_map(split_heads(self.query(hidden_states), heads).float())
        k = feature_map(split_heads(self.key(hidden_states), heads).float())
        v = split_heads(self.value(hidden_states), heads).float()
        s = state["s"] + k.transpose(-1, -2) @ v
        z = state["z"] + k.squeeze(2)
        context = (q @ s) / (q @ z.unsqueeze(-1) + self.spec.eps)
        return self.out(merge_heads(context).to(hidden_states.dtype)), {"s": s, "z": z}

    def prefill(self, hidden_states: Tensor, keep: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v = (x.float() for x in self.project(hidden_states))
        visible = keep[:, None, :, None]
        q, k, v = feature_map(q), torch.where(visible, feature_map(k), 0.0), torch.where(visible, v, 0.0)
        sums = causal_sums(q, k, v, self.spec.chunk_length)
        # what the earlier tokens add to the numerator and the denominator
        numerator = sums[..., :-1] + q @ state["s"]
        denominator = sums[..., -1:] + q @ state["z"].unsqueeze(-1)
        context = merge_heads(numerator / (denominator + self.spec.eps)).to(hidden_states.dtype)
        return self.out(context), {"s": state["s"] + k.transpose(-1, -2) @ v, "z": state["z"] + k.sum(dim=-2)}


def feature_map(x: Tensor) -> Tensor:
    """elu(x) + 1, written so that it does not round to zero for x below -18 (float32) or -9 (float16)."""
    return torch.where(x > 0, x + 1, torch.exp(torch.clamp(x, max=0)))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    """q, k: mapped features, k masked, [batch, heads, seq, head_dim]; v likewise. Returns the shape of v."""
    s = k.transpose(-1, -2) @ v
    z = k.sum(dim=-2).unsqueeze(-1)
    return (q @ s) / (q @ z + eps)


def causal_linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float, chunk_length: int) -> Tensor:
    """The causal form of `linear_attention`, with the same shapes."""
    sums = causal_sums(q, k, v, chunk_length)
    return sums[..., :-1] / (sums[..., -1:] + eps)


def causal_sums(q: Tensor, k: Tensor, v: Tensor, chunk_length: int) -> Tensor:
    """q_iᵀ Σ_j≤i k_j v_jᵀ and, as one more channel, q_i·Σ_j≤i k_j: [batch, heads, seq, head_dim + 1].

    Exact, block by block: triangular products inside a block, prefix sums between blocks. No loop, and no state per
    token.
    """
    seq_len, head_dim = q.shape[2], v.shape[-1]
    blocks = (seq_len + chunk_length - 1) // chunk_length
    pad = blocks * chunk_length - seq_len
    # a column of ones under v makes the denominator one more channel of the same products
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, chunk_length)) for x in (q, k, v))
    inside = (q @ k.transpose(-1, -2)) * causal_mask(chunk_length, q.device).to(q.dtype)
    block_states = (k.transpose(-1, -2) @ v).flatten(-2)
    earlier = causal_mask(blocks, q.device) & ~torch.eye(blocks, dtype=torch.bool, device=q.device)
    before = (earlier.to(q.dtype) @ block_states).unflatten(-1, (q.shape[-1], head_dim + 1))
    # narrow, not a slice: a slice gives the exported graph a length of min(seq, …)
    return torch.flatten(inside @ v + q @ before, 2, 3).narrow(2, 0, seq_len)
