"""Options and facts of window attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.attention_spec import QueryKeySpec
from effexport.models.shapes import Product
from effexport.models.validation import nearest_multiples, require


@dataclass(frozen=True, kw_only=True, repr=False)
class WindowSpec(QueryKeySpec):
    """Window attention.

    window: w, the tokens near a query that it sees: w/2 before and w/2 after itself, and if causal the last w, itself
    among them. global_tokens: g, the first tokens of the sequence, which every query sees and which see every token.
    """

    variant: ClassVar[str] = "window"
    place: ClassVar[int] = 90
    layer: ClassVar[str] = "variants.window.layer.WindowAttention"
    formula: ClassVar[str] = "softmax(QKᵀ/√d over w near and g global keys) V"
    cost: ClassVar[str] = "n·(w + g)·d"
    is_length_free: ClassVar[bool] = True
    causal_state_is_constant: ClassVar[bool] = True

    window: int = 256
    global_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 1, f"window is {self.window}; expected a positive number of tokens")
        require(
            self.causal or self.window % 2 == 0,
            f"window is {self.window}; expected an even number, half of it on each side of a token; use "
            f"{nearest_multiples(self.window, 2)}",
        )
        require(self.global_tokens >= 0, f"global_tokens is {self.global_tokens}; expected 0 or more")

    @property
    def left(self) -> int:
        """Tokens before a query that it sees."""
        return self.window - 1 if self.causal else self.window // 2

    @property
    def right(self) -> int:
        """Tokens after a query that it sees."""
        return 0 if self.causal else self.window // 2

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("BandedAttention",) if fused else ()

    @property
    def has_decode_step(self) -> bool:
        """The state of a step has the last tokens, not the first ones."""
        return super().has_decode_step and self.global_tokens == 0

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        n, d, groups = seq_len, self.head_size, batch * self.heads
        seen = min(n, self.left + 1 + self.right) + self.global_tokens
        yield Product(groups, n, d, seen)  # Q Kᵀ
        yield Product(groups, n, seen, d)  # P V
        if self.global_tokens:
            yield Product(groups, self.global_tokens, d, n)
            yield Product(groups, self.global_tokens, n, d)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return batch * self.heads * seq_len * (2 * self.window + self.global_tokens)
