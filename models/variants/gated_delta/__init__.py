"""Options and facts of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Shapes, linear
from effexport.models.variants.delta import DeltaSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class GatedDeltaSpec(DeltaSpec):
    """The gated delta rule."""

    variant: ClassVar[str] = "gated-delta"
    place: ClassVar[int] = 110
    layer: ClassVar[str] = "variants.gated_delta.layer.GatedDeltaAttention"
    formula: ClassVar[str] = "norm(Sᵀq/√d) · SiLU(g), S ← αS + βk(v − αSᵀk)ᵀ"
    has_gate: ClassVar[bool] = True

    @property
    def other_channels(self) -> dict[str, int]:
        return {"beta": 1, "decay": 1}

    def weights(self) -> Shapes:
        decay = linear("decay", self.dim, self.heads, bias=False) | {"a_log": (self.heads,), "dt_bias": (self.heads,)}
        return super().weights() | decay
