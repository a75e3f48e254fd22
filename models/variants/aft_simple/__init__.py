"""Options and facts of AFT-simple."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Product
from effexport.models.variants.aft import AFTSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTSimpleSpec(AFTSpec):
    """Attention-free transformer without position biases."""

    variant: ClassVar[str] = "aft-simple"
    place: ClassVar[int] = 60
    layer: ClassVar[str] = "variants.aft_simple.layer.AFTSimpleAttention"
    formula: ClassVar[str] = "σ(Q) ⊙ Σ exp(K) V / Σ exp(K)"
    cost: ClassVar[str] = "n·d"
    is_length_free: ClassVar[bool] = True
    causal_state_is_constant: ClassVar[bool] = True

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTSimpleAttention",) if fused and not self.causal else ()

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """None: the sums have no weights."""
        return iter(())
