"""Options and facts of retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effexport.models.attention_spec import QueryKeySpec
from effexport.models.shapes import Shapes, norm
from effexport.models.variants.recurrence_spec import RecurrentSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class RetentionSpec(RecurrentSpec, QueryKeySpec):
    """Retention, the attention of RetNet, whose published models have rotary positions."""

    variant: ClassVar[str] = "retention"
    place: ClassVar[int] = 120
    layer: ClassVar[str] = "variants.retention.layer.Retention"
    formula: ClassVar[str] = "norm(Sᵀq/√d) · SiLU(g), S ← γS + kvᵀ, γ = 1 − 2^(−5−h)"
    cost: ClassVar[str] = "n·d²/heads"
    has_gate: ClassVar[bool] = True

    conv_size: int = 0

    def weights(self) -> Shapes:
        return super().weights() | norm("norm", self.heads * self.value_size)
