"""Options and facts of gated linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Shapes, linear
from effexport.models.validation import require
from effexport.models.variants.recurrence_spec import RecurrentSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class GLASpec(RecurrentSpec):
    """Gated linear attention.

    gate_low_rank_dim: rank of the projection that gives the decays. gate_logit_normalizer: τ; a decay is the sigmoid of
    its projection to the power of 1/τ.
    """

    variant: ClassVar[str] = "gla"
    place: ClassVar[int] = 130
    layer: ClassVar[str] = "variants.gla.layer.GatedLinearAttention"
    formula: ClassVar[str] = "norm(Sᵀq/√d) · SiLU(g), S ← diag(α)S + kvᵀ"
    cost: ClassVar[str] = "n·d²/heads"
    has_gate: ClassVar[bool] = True

    conv_size: int = 0
    # a chunk takes chunk_length² · head_dim numbers
    chunk_length: int = 16
    gate_low_rank_dim: int = 16
    gate_logit_normalizer: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rank, normalizer = self.gate_low_rank_dim, self.gate_logit_normalizer
        require(rank >= 1, f"gate_low_rank_dim is {rank}; expected a positive integer")
        require(normalizer > 0, f"gate_logit_normalizer is {normalizer}; expected a number > 0")

    @property
    def other_channels(self) -> dict[str, int]:
        return {"decay": self.head_size}

    def weights(self) -> Shapes:
        rank = self.gate_low_rank_dim
        low = linear("decay_down", self.dim, rank, bias=False)
        return super().weights() | low | linear("decay_up", rank, self.inner_dim)
