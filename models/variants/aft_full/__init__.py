"""Options and facts of AFT-full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Product
from effexport.models.variants.aft import AFTPositionSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTFullSpec(AFTPositionSpec):
    """AFT with a learned bias for every pair of positions."""

    variant: ClassVar[str] = "aft-full"
    place: ClassVar[int] = 50
    layer: ClassVar[str] = "variants.aft_full.layer.AFTFullAttention"
    formula: ClassVar[str] = "σ(Q) ⊙ Σ exp(K + w) V / Σ exp(K + w)"
    cost: ClassVar[str] = "n²·d"
    is_quadratic: ClassVar[bool] = True

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """e^w times e^k v and e^k side by side; w depends on parameters alone, and need not be made again."""
        yield Product(batch, seq_len, seq_len, 2 * self.inner_dim)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        """e^w, which the samples of a batch share."""
        return seq_len**2
