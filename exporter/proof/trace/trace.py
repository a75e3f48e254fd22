"""What a comparison of intermediate values found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import METRIC

# How many nodes or weights a sentence lists.
LISTED = 5


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
        """Of the limit, for ranking; infinite for NaN, and where nothing is allowed."""
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

    def __str__(self) -> str:
        """For people: the first divergence, what agrees before it, and how much was compared."""
        compared = f"{len(self.values)} of {self.pairable} values were compared with PyTorch's ({self.case})"
        if not self.values:
            return f"no trace: none of the {self.pairable} values has kept its name in {self.model}"
        if self.first_divergence is None:
            return f"no divergence: {compared}, and all agree where the runtime does not optimise the graph"
        value = self.first_divergence
        agreeing = self.values.index(value)
        what = METRIC if value.limit else "share of elements that differ"
        before = f"the {agreeing} values before it agree" if agreeing else "it is the first value"
        return (
            f"first divergence: value `{value.name}` of {value.module or 'the model itself'} ({value.op_type}), {what} "
            f"{value.error:.2g} > {value.limit:.2g}; {before}; {self._where()}. {compared}"
        )

    def _where(self) -> str:
        if len(self.suspects) > 1:
            listed = ", ".join(f"{s.op_type} `{s.value}`" for s in self.suspects[:LISTED])
            more = f" and {len(self.suspects) - LISTED} more" if len(self.suspects) > LISTED else ""
            where = f"the last values that agree enter these nodes, one of which is wrong: {listed}{more}"
        else:
            where = "its inputs agree"
        weights = list(dict.fromkeys(name for suspect in self.suspects for name in suspect.weights))
        if weights:
            where += f", or the weights {', '.join(weights[:LISTED])}{' …' if len(weights) > LISTED else ''}"
        return where
