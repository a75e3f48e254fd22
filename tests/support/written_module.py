"""A model that a test writes as a function, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

DIM = 16


class Written(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.change = nn.Linear(DIM, DIM), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


def vectors(batch: int, seq_len: int) -> Tensor:
    """Random [batch, seq_len, DIM], the same for the same sizes."""
    return torch.randn(batch, seq_len, DIM, generator=torch.Generator().manual_seed(seq_len))
