"""Options and facts of AFT-conv."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Product, Shapes, banded_products
from effexport.models.validation import check_kernel_size, require
from effexport.models.variants.aft import AFTSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTConvSpec(AFTSpec):
    """AFT with biases that depend on the offset only.

    kernel_size: s taps of the relative position bias of each head, centred. std_eps keeps the re-parameterised filter
    finite when all its taps are equal.
    """

    variant: ClassVar[str] = "aft-conv"
    place: ClassVar[int] = 80
    layer: ClassVar[str] = "variants.aft_conv.layer.AFTConvAttention"
    formula: ClassVar[str] = "as aft-full, w from a filter of s taps per head"
    cost: ClassVar[str] = "n·s·d"
    is_length_free: ClassVar[bool] = True
    has_heads: ClassVar[bool] = True

    kernel_size: int = 11
    std_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel_size("kernel_size", self.kernel_size)
        require(self.std_eps > 0, f"std_eps is {self.std_eps}; expected a number > 0")

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTWindowAttention",) if fused else ()

    def weights(self) -> Shapes:
        taps: Shapes = {"weight": (self.heads, self.kernel_size), "gamma": (self.heads,), "beta": (self.heads,)}
        return super().weights() | taps

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        """Each head has a single key channel."""
        return self.heads, {"q": self.head_size, "k": 1, "v": self.head_size}

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """Per head, e^w times the channels of e^k v and the one channel of e^k."""
        yield from banded_products(batch * self.heads, seq_len, self.head_size + 1, reach=self.kernel_size // 2)
