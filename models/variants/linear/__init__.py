"""Options and facts of linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from effexport.models.attention_spec import QueryKeySpec
from effexport.models.contract import HostileInputs
from effexport.models.shapes import Product
from effexport.models.validation import nearest_multiples, require


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearSpec(QueryKeySpec):
    """Linear attention. eps: added once to the denominator. chunk_length: block length of the causal form.

    feature_map: φ, "elu" for elu + 1. "softmax" maps queries and keys differently: queries to their softmax over the
    channels, times 1/√d, and keys to their softmax over the tokens. The causal form has e^k in place of the latter.
    normalizer: whether the sum φ(Q)Σφ(K) divides the result. min_denominator: the denominator is at least this.
    blindspot: above 1, a causal query sees only the keys of earlier blocks of this many tokens, and none of its own.
    """

    variant: ClassVar[str] = "linear"
    place: ClassVar[int] = 20
    layer: ClassVar[str] = "variants.linear.layer.LinearAttention"
    formula: ClassVar[str] = "φ(Q)(φ(K)ᵀV) / (φ(Q)Σφ(K) + ε), φ = elu + 1"
    cost: ClassVar[str] = "n·d²/heads"
    is_length_free: ClassVar[bool] = True
    # φ(k) = e^k for k < 0: denominators of the size of eps, and far below float16's smallest number
    hostile: ClassVar[HostileInputs] = HostileInputs(small_key=-16.0)
    causal_state_is_constant: ClassVar[bool] = True

    eps: float = 1e-6
    chunk_length: int = 64
    feature_map: Literal["elu", "relu", "exp", "softmax"] = "elu"
    normalizer: bool = True
    min_denominator: float = 0.0
    blindspot: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eps >= 0, f"eps is {self.eps}; expected a number >= 0")
        require(self.chunk_length >= 1, f"chunk_length is {self.chunk_length}; expected at least 1")
        least = self.min_denominator
        require(least >= 0, f"min_denominator is {least}; expected a number >= 0")
        require(
            self.normalizer or least == 0,
            f"min_denominator is {least}, but without a normalizer there is no denominator; leave one of them out",
        )
        require(self.blindspot >= 1, f"blindspot is {self.blindspot}; expected at least 1")
        require(
            self.blindspot == 1 or self.causal,
            f"blindspot is {self.blindspot}, but a layer that is not causal sees every key; leave blindspot out",
        )
        require(
            self.chunk_length % self.blindspot == 0,
            f"chunk_length {self.chunk_length} is not a multiple of blindspot {self.blindspot}; use chunk_length "
            f"{nearest_multiples(self.chunk_length, self.blindspot)}",
        )

    @property
    def has_fused_operator(self) -> bool:
        """True if `EluLinearAttention` computes this layer."""
        return (
            self.feature_map in ("elu", "relu")
            and self.normalizer
            and self.min_denominator == 0
            and self.blindspot == 1
        )

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("EluLinearAttention",) if fused and self.has_fused_operator else ()

    @property
    def trace_chunk(self) -> int:
        return self.chunk_length

    @property
    def has_decode_step(self) -> bool:
        return super().has_decode_step and self.blindspot == 1

    @property
    def hostile_inputs(self) -> HostileInputs:
        # hidden states with such keys have queries whose exponential overflows
        return HostileInputs() if self.feature_map == "exp" else self.hostile

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        n, d, groups = seq_len, self.head_size, batch * self.heads
        yield Product(groups, d, n, d)  # S = φ(K)ᵀ V
        yield Product(groups, n, d, d)  # φ(Q) S
