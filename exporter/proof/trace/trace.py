"""What a comparison of intermediate values found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from effexport.proof.case_label import CaseLabel


@dataclass(frozen=True)
class TracedValue:
    """One value of the graph beside PyTorch's. module: path of the module it belongs to, "" for the root.

    error: max |error| / RMS; of integers and booleans the share that differs; infinite for another shape. NaN fails.
    """

    name: str
    module: str
    op_type: str
    error: float
    limit: float

    @property
    def diverges(self) -> bool:
        return not self.error <= self.limit

    @property
    def share(self) -> float:
        """Share of the limit that was used; ranks the values. Infinite for NaN and beyond a limit of 0."""
        if self.error != self.error or self.error > self.limit == 0:
            return float("inf")
        return self.error / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class Suspect:
    """A node that may be at fault. weights: the initializers it reads."""

    value: str
    op_type: str
    module: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """The paired values of a model in the order of its graph.

    case: the input it ran on. pairable: how many values a file of this export has in common with PyTorch.
    not_paired: values of the file without a counterpart: steps inside one operation of PyTorch, and what a tool has
    renamed. suspects: if a value diverges, its node, and those between it and the last values that agree.
    """

    model: str
    case: CaseLabel
    values: tuple[TracedValue, ...]
    pairable: int
    not_paired: int
    suspects: tuple[Suspect, ...] = ()

    @cached_property
    def first_divergence(self) -> TracedValue | None:
        return next((value for value in self.values if value.diverges), None)

    def layers(self) -> list[dict[str, Any]]:
        """Per module path in the order of the graph, the value closest to its limit or furthest beyond:
        layer, op_type, error, limit, value."""
        worst: dict[str, TracedValue] = {}
        for value in self.values:
            if value.module not in worst or value.share > worst[value.module].share:
                worst[value.module] = value
        return [
            {"layer": module, "op_type": v.op_type, "error": v.error, "limit": v.limit, "value": v.name}
            for module, v in worst.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        first = self.first_divergence
        return {
            "model": self.model,
            "case": str(self.case),
            "paired": len(self.values),
            "pairable": self.pairable,
            "not_paired": self.not_paired,
            "first_divergence": asdict(first) if first else None,
            "suspects": [asdict(suspect) for suspect in self.suspects],
            "layers": self.layers(),
        }
