"""A model that calls the operator: linear attention with an output gate, as in RetNet and its successors."""

from __future__ import annotations

import gated_rms_norm.op  # noqa: F401 - declares torch.ops.effexport.gated_rms_norm
import torch
from torch import Tensor, nn

from effexport.models import attention_from_spec
from effexport.models.variants.linear import LinearSpec


class GatedRMSNorm(nn.Module):
    def __init__(self, channels: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.ops.effexport.gated_rms_norm(x, gate, self.weight, self.epsilon)


class GatedAttention(nn.Module):
    """hidden_states [batch, seq, dim] → the same, plus attention that is normalised and gated."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = attention_from_spec(LinearSpec(dim=dim, heads=heads, causal=True))
        self.gate = nn.Linear(dim, dim)
        self.norm = GatedRMSNorm(dim)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        mixed = self.attention(hidden_states, attention_mask)
        return hidden_states + self.norm(mixed, self.gate(hidden_states))


def make() -> nn.Module:
    """For `effexport build --module gated_model:make`. Yours would load its trained weights here."""
    torch.manual_seed(0)
    model = GatedAttention(dim=128, heads=4)
    nn.init.uniform_(model.norm.weight, 0.5, 1.5)
    return model
