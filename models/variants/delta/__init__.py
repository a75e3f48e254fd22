"""Options and facts of the delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Shapes, linear
from effexport.models.variants.recurrence_spec import RecurrentSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class DeltaSpec(RecurrentSpec):
    """The delta rule."""

    variant: ClassVar[str] = "delta"
    place: ClassVar[int] = 100
    layer: ClassVar[str] = "variants.delta.layer.DeltaAttention"
    formula: ClassVar[str] = "norm(Sᵀq/√d), S ← S + βk(v − Sᵀk)ᵀ"
    cost: ClassVar[str] = "n·d²/heads"
    delta: ClassVar[bool] = True

    @property
    def other_channels(self) -> dict[str, int]:
        return {"beta": 1}

    def weights(self) -> Shapes:
        return super().weights() | linear("beta", self.dim, self.heads, bias=False)
