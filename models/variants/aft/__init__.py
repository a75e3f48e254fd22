"""Shared specs of the attention-free transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from effexport.models.attention_spec import AttentionSpec
from effexport.models.contract import HostileInputs
from effexport.models.shapes import Shapes
from effexport.models.validation import require


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTSpec(AttentionSpec):
    """The common spec of attention-free transformers: sums weighted by e^k, per channel.

    Channels do not depend on each other, so without heads × head_dim as another width, heads make no difference.
    """

    has_heads: ClassVar[bool] = False
    # where float16 gives 0 / 0, where float32 loses e^k, where it overflows
    hostile: ClassVar[HostileInputs] = HostileInputs(key_gaps=(20, 60, 110))


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTPositionSpec(AFTSpec):
    """AFT with position biases w, learned for up to `seq_len` positions.

    position_bias: "factored" learns u and v of w = u vᵀ, as the paper does; "full" learns w itself, seq_len × seq_len
    numbers. position_dim: d', the rank of a factored w.
    """

    max_seq_len_is_seq_len: ClassVar[bool] = True

    position_bias: Literal["factored", "full"] = "factored"
    position_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.position_dim >= 1, f"position_dim is {self.position_dim}; expected at least 1")

    def weights(self) -> Shapes:
        if self.position_bias == "full":
            return super().weights() | {"position_bias": (self.seq_len, self.seq_len)}
        factor = self.seq_len, self.position_dim
        return super().weights() | dict.fromkeys(("position_query", "position_key"), factor)
