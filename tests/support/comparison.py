"""Random tokens, and how far results on them are apart."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_kept(x: Tensor) -> Tensor:
    """A boolean mask [batch, seq] that hides nothing."""
    return torch.ones(x.shape[:2], dtype=torch.bool)


def relative_error(actual: Tensor, expected: Tensor, where: Tensor | None = None) -> float:
    """Largest difference as a fraction of the RMS of `expected`. where: boolean, the positions that count."""
    assert actual.shape == expected.shape
    actual, expected = (x.detach()[... if where is None else where].double() for x in (actual, expected))
    assert torch.isfinite(actual).all()
    assert torch.isfinite(expected).all()
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())
