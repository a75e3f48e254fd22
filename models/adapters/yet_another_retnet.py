"""yet-another-retnet: multi-scale retention, whose heads forget at fixed rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, refuse
from effexport.models.adapters.linear_function import RecurrentFunction
from effexport.models.layers import rotate_pairs

# A head forgets between these parts of its state with every token (arXiv 2307.08621, section 3.1).
FASTEST, SLOWEST = 1 / 32, 1 / 512


class MultiScaleRetention(nn.Module):
    """MultiScaleRetention at any length, in linear time. All forms of the original are one, with or without a state."""

    decay: Tensor
    frequencies: Tensor | None

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj
        self.out_proj, self.group_norm = layer.out_proj, layer.group_norm
        self.activation = layer.activation
        self.heads: int = layer.num_heads
        rates = torch.tensor([FASTEST, SLOWEST], dtype=torch.float64).log()
        forgotten = torch.linspace(float(rates[0]), float(rates[1]), self.heads, dtype=torch.float64).exp()
        self.register_buffer("decay", torch.log1p(-forgotten).float(), persistent=False)
        # one for each pair of channels
        self.register_buffer("frequencies", layer.thetas[::2] if layer.relative_position else None, persistent=False)
        self.recurrence = RecurrentFunction("gated-linear", delta=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """query, key, value [batch, seq, dim] → the same shape, and None."""
        return self.forward_parallel(query, key, value, need_weights=need_weights)

    def forward_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """See `forward`."""
        refuse(need_weights=need_weights)
        return self.forward_chunkwise(query, key, value, 0, None)[0], None

    def forward_recurrent(
        self, query: Tensor, key: Tensor, value: Tensor, seq_idx: int, prev_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One token: [batch, dim]. seq_idx: its position. Returns the same shape and the next state."""
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        out, state = self.forward_chunkwise(query, key, value, seq_idx, prev_state)
        return out.squeeze(1), state

    def forward_chunkwise(
        self, query: Tensor, key: Tensor, value: Tensor, start_idx: int, prev_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """query, key, value [batch, seq, dim]; start_idx: position of the first token; prev_state [batch, heads,
        head_dim, head_dim], None for zeros. Returns the context as query, and the state after the last token."""
        pairs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear, x in pairs)
        if self.frequencies is not None:
            position = torch.arange(q.shape[1], device=q.device, dtype=q.dtype) + start_idx
            angles = position[:, None, None] * self.frequencies
            q, k = (rotate_pairs(x, angles.sin(), angles.cos()) for x in (q, k))
        decay = self.decay.expand(k.shape[:3])
        context, state = self.recurrence(q, k, v, decay, torch.ones_like(decay), prev_state, q.shape[-1] ** -0.5)
        context = self.group_norm(context.flatten(2).flatten(0, 1)).view_as(query)
        projected: Tensor = self.out_proj(context * self.activation(self.g_proj(query)))
        return projected, state


ADAPTER = Adapter(
    package="yet-another-retnet",
    tested=("0.5",),
    projections=("q_proj", "k_proj", "v_proj", "g_proj", "out_proj"),
    replacements={"yet_another_retnet.retention.MultiScaleRetention": MultiScaleRetention},
)
