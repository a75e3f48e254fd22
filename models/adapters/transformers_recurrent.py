"""transformers: linear attention over a state inside other models. Qwen3-Next and Mamba-2.

PyTorch's form of these layers loops over chunks, so torch.export ties it to one length; and their models decide by the
values of a mask. Ours is one operator, at any length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, refuse, shallow_copy
from effexport.models.adapters.linear_function import RecurrentFunction
from effexport.models.layers import at_least_float32

# Of the sum of squares, as transformers normalises queries and keys.
NORM_EPS = 1e-6


def without_padding(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """hidden_states [batch, seq, dim] with zeros where attention_mask [batch, seq] is 0.

    As in transformers, a mask changes nothing in a batch of one, whose size a graph does not know.
    """
    if attention_mask is None:
        return hidden_states
    is_alone = torch.ones(attention_mask.shape[0], device=attention_mask.device).sum() == 1
    keep = (attention_mask != 0) | is_alone
    return hidden_states * keep.unsqueeze(-1).to(hidden_states.dtype)


def convolved(x: Tensor, conv: Any, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel: x [batch, channels, seq] → the same, and the last kernel_size columns of
    its input, which are the next `before`; None for zeros."""
    (size,) = conv.kernel_size
    padded = F.pad(x, (size, 0)) if before is None else torch.cat((before.to(x.dtype), x), dim=-1)
    return F.conv1d(padded[..., 1:], conv.weight, conv.bias, groups=conv.groups), padded[..., -size:]


def unit(x: Tensor) -> Tensor:
    """x [..., channels] of length 1, in float32 at least."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def repeated(x: Tensor, times: int) -> Tensor:
    """x [batch, seq, heads, channels] → [batch, seq, heads · times, channels], each head `times` times in a row."""
    return x if times == 1 else x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


class GatedDeltaNet(nn.Module):
    """Qwen3NextGatedDeltaNet at any length: a short convolution, the gated delta rule, and a norm with a gate."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.in_proj_qkvz, self.in_proj_ba, self.out_proj = layer.in_proj_qkvz, layer.in_proj_ba, layer.out_proj
        self.conv1d, self.norm = layer.conv1d, layer.norm
        self.A_log, self.dt_bias = layer.A_log, layer.dt_bias
        self.layer_idx: int = layer.layer_idx
        self.key_heads: int = layer.num_k_heads
        self.key_dim: int = layer.head_k_dim
        self.value_dim: int = layer.head_v_dim
        self.values_per_key: int = layer.num_v_heads // layer.num_k_heads
        self.recurrence = RecurrentFunction("gated-delta", delta=True)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        cache_position: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """hidden_states [batch, seq, dim] → the same; attention_mask [batch, seq], 1 = keep.

        cache_params: Qwen3NextDynamicCache, which gets the states after the last token. As in the original, a single
        token goes on where the cache ends, and several begin anew.
        """
        refuse(**kwargs)
        past, before = None, None
        if cache_params is not None and cache_params.has_previous_state and hidden_states.shape[1] == 1:
            past = cache_params.recurrent_states[self.layer_idx]
            before = cache_params.conv_states[self.layer_idx]
        else:
            hidden_states = without_padding(hidden_states, attention_mask)
        # of each head of keys: a query, a key, and values and gates of several heads
        widths = [self.key_dim] * 2 + [self.values_per_key * self.value_dim] * 2
        *qkv, z = self.in_proj_qkvz(hidden_states).unflatten(-1, (self.key_heads, -1)).split(widths, dim=-1)
        b, a = (x.flatten(-2) for x in self.in_proj_ba(hidden_states).unflatten(-1, (self.key_heads, -1)).chunk(2, -1))
        mixed, last = convolved(torch.cat([x.flatten(-2) for x in qkv], dim=-1).transpose(1, 2), self.conv1d, before)
        widths = [self.key_heads * width for width in widths[:3]]
        q, k, v = F.silu(mixed).transpose(1, 2).split(widths, dim=-1)
        q, k = (repeated(unit(x.unflatten(-1, (self.key_heads, -1))), self.values_per_key) for x in (q, k))
        v, z = (x.unflatten(-1, (-1, self.value_dim)) for x in (v, z.flatten(-2)))
        decay = -at_least_float32(self.A_log).exp() * F.softplus(at_least_float32(a) + self.dt_bias)
        out, present = self.recurrence(q, k, v, decay, b.sigmoid(), past, self.key_dim**-0.5)
        if cache_params is not None:
            cache_params.recurrent_states[self.layer_idx] = present
            cache_params.conv_states[self.layer_idx] = last
        projected: Tensor = self.out_proj(self.norm(out, z).flatten(-2))
        return projected


def qwen3_next(layer: Any, seq_len: int) -> Any:
    """Qwen3NextModel, without its question if a mask hides any token."""
    made = shallow_copy(layer)
    made._update_linear_attn_mask = mask_as_given
    return made


def mask_as_given(attention_mask: Tensor | None, cache_position: Tensor) -> Tensor | None:
    return attention_mask


class SparseExperts(nn.Module):
    """Qwen3NextSparseMoeBlock, with all its experts in the graph. Each computes the tokens that chose it."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.gate, self.experts = layer.gate, layer.experts
        self.shared_expert, self.shared_expert_gate = layer.shared_expert, layer.shared_expert_gate
        self.top_k: int = layer.top_k
        self.norm_topk_prob: bool = layer.norm_topk_prob

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [batch, seq, dim] → the same, and the logits of the router [batch · seq, experts]."""
        tokens = hidden_states.flatten(0, 1)
        logits = self.gate(tokens)
        weights, chosen = at_least_float32(logits).softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(tokens.dtype)
        result = torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            own = expert(tokens[row]) * weights[row, place].unsqueeze(-1)
            result = result.index_put((row,), own, accumulate=True)
        return result.view_as(hidden_states), logits


class StateSpaceMixer(nn.Module):
    """Mamba2Mixer at any length: a short convolution, a recurrence with one decay per head, and a norm with a gate."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.in_proj, self.conv1d, self.norm, self.out_proj = layer.in_proj, layer.conv1d, layer.norm, layer.out_proj
        self.act = layer.act
        self.A_log, self.dt_bias, self.D = layer.A_log, layer.dt_bias, layer.D
        self.layer_idx: int = layer.layer_idx
        self.groups: int = layer.n_groups
        self.heads_per_group: int = layer.num_heads // layer.n_groups
        self.widths = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
        self.head_dim: int = layer.head_dim
        self.limits: tuple[float, float] = layer.time_step_limit
        self.recurrence = RecurrentFunction("gated-linear", delta=False)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        cache_position: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [batch, seq, dim] → the same; attention_mask [batch, seq], 1 = keep.

        cache_params: Mamba2Cache. Tokens go on from its states, which are zeros before the first, and it gets those
        after the last token.
        """
        past, before = None, None
        if cache_params is not None:
            before = cache_params.conv_states[self.layer_idx]
            past = cache_params.ssm_states[self.layer_idx].transpose(-1, -2)
        gate, mixed, step = self.in_proj(without_padding(hidden_states, attention_mask)).split(self.widths, dim=-1)
        mixed, last = convolved(mixed.transpose(1, 2), self.conv1d, before)
        mixed = without_padding(self.act(mixed).transpose(1, 2), attention_mask)
        inner = self.widths[0]
        x, keys, queries = mixed.split([inner, *[(self.widths[1] - inner) // 2] * 2], dim=-1)
        x = at_least_float32(x.unflatten(-1, (-1, self.head_dim)))
        q, k = (repeated(x.unflatten(-1, (self.groups, -1)), self.heads_per_group) for x in (queries, keys))
        step = F.softplus(at_least_float32(step) + self.dt_bias).clamp(*self.limits)
        decay = -at_least_float32(self.A_log).exp() * step
        out, present = self.recurrence(q, k, x, decay, step, past, 1.0)
        if cache_params is not None:
            cache_params.update_conv_state(layer_idx=self.layer_idx, new_conv_state=last, cache_init=True)
            cache_params.update_ssm_state(layer_idx=self.layer_idx, new_ssm_state=present.transpose(-1, -2))
        mixed = self.norm((out + self.D.unsqueeze(-1) * x).flatten(-2), gate)
        projected: Tensor = self.out_proj(mixed.to(hidden_states.dtype))
        return projected


QWEN3_NEXT = "transformers.models.qwen3_next.modeling_qwen3_next"
MAMBA2 = "transformers.models.mamba2.modeling_mamba2"
ADAPTER = Adapter(
    package="transformers",
    tested=("4.57",),
    projections=("in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj"),
    replacements={
        f"{QWEN3_NEXT}.Qwen3NextGatedDeltaNet": GatedDeltaNet,
        f"{QWEN3_NEXT}.Qwen3NextSparseMoeBlock": SparseExperts,
        f"{QWEN3_NEXT}.Qwen3NextModel": qwen3_next,
        f"{MAMBA2}.Mamba2Mixer": StateSpaceMixer,
    },
)
