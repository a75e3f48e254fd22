"""An attention layer without its projections: what benchmarks of attention itself time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effexport.models.layers import AttentionLayer


class AttentionCore(nn.Module):
    """`AttentionLayer.mix` as a module of its own, without padding."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *projected: Tensor) -> Tensor:
        """What the layer's `project` returns, each [batch, heads, seq, channels] → [batch, heads, seq, head_dim]."""
        batch, _, seq_len, _ = projected[0].shape
        keep = torch.ones(batch, seq_len, dtype=torch.bool, device=projected[0].device)
        return self.layer.mix(projected, keep)
