"""Options and facts of AFT-local."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Product, banded_products
from effexport.models.validation import require
from effexport.models.variants.aft import AFTPositionSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTLocalSpec(AFTPositionSpec):
    """AFT with biases for near pairs only.

    window: s; the position bias acts where |t − t'| < s and is zero elsewhere (attention stays global).
    """

    variant: ClassVar[str] = "aft-local"
    place: ClassVar[int] = 70
    layer: ClassVar[str] = "variants.aft_local.layer.AFTLocalAttention"
    formula: ClassVar[str] = "as aft-full, w = 0 outside a window s"
    cost: ClassVar[str] = "n·s·d"

    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 0, f"window is {self.window}; expected 0 or more")

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTWindowAttention",) if fused else ()

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """e^w times e^k v and e^k side by side."""
        yield from banded_products(batch, seq_len, 2 * self.inner_dim, reach=self.window - 1)
