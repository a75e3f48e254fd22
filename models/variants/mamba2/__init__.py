"""Options and facts of Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effexport.models.shapes import Shapes, linear
from effexport.models.validation import nearest_divisors, require
from effexport.models.variants.recurrence_spec import RecurrentSpec


@dataclass(frozen=True, kw_only=True, repr=False)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2's state-space layer.

    Its C, B and x are queries, keys and values: head_dim is what it calls the size of a state, and value_dim its size
    of a head. groups: queries and keys of each token; the heads of a group share one of each.
    """

    variant: ClassVar[str] = "mamba2"
    place: ClassVar[int] = 140
    layer: ClassVar[str] = "variants.mamba2.layer.Mamba2"
    formula: ClassVar[str] = "norm((Sᵀc + Dx) · SiLU(z)), S ← e^(−Δeᴬ)S + Δbxᵀ"
    cost: ClassVar[str] = "n·d²/heads"
    has_gate: ClassVar[bool] = True

    groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.conv_size >= 2, f"conv_size is {self.conv_size}; mamba2 has a convolution of at least 2 taps")
        require(
            self.groups >= 1 and self.heads % self.groups == 0,
            f"heads {self.heads} cannot be split into {self.groups} groups of equal size; use groups "
            f"{nearest_divisors(self.groups, self.heads)}",
        )

    @property
    def key_width(self) -> int:
        return self.groups * self.head_size

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        """One head of all channels: queries and keys have fewer heads than values."""
        width = self.heads * self.value_size
        return 1, {"q": self.key_width, "k": self.key_width, "v": width, "dt": self.heads}

    def least_elements(self, batch: int, seq_len: int) -> int:
        """Those of the values: heads × head_dim is more than the shared queries and keys have."""
        return batch * seq_len * max(self.dim, self.heads * self.value_size)

    def weights(self) -> Shapes:
        shapes = super().weights() | linear("dt", self.dim, self.heads, bias=False)
        for name in ("dt_bias", "a_log", "skip"):
            shapes[name] = (self.heads,)
        return shapes | {"taps_bias": (self.convolved,), "norm.weight": (self.heads * self.value_size,)}
