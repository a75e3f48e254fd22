"""What an evaluation found, as its JSON has it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from effexport.evaluation.estimates import Changes, Estimate


class Objective(StrEnum):
    """What the logits of a model predict."""

    LANGUAGE_MODEL = "language model"  # the next token
    MASKED_LANGUAGE_MODEL = "masked language model"  # the token in a masked place
    CLASSIFICATION = "classification"  # the class of a row
    TOKEN_CLASSIFICATION = "token classification"  # the class of each token


# What texts without labels can judge.
LANGUAGE = (Objective.LANGUAGE_MODEL, Objective.MASKED_LANGUAGE_MODEL)


@dataclass(frozen=True)
class Comparison:
    """Another model on the same rows. differences: the figures of the first model minus those of this one."""

    model: str
    estimates: tuple[Estimate, ...]
    differences: tuple[Estimate, ...]
    changes: Changes
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on labelled data. data_sha256: of a file, "" for arrays. answers: how many labels there were.
    seconds: of the runs.

    label: the attention, as benchmarks call it. spec: of the artifact, as its manifest has it. tokens: of the longest
    row. precision: what it computes in.
    """

    model: str
    label: str
    spec: dict[str, Any]
    runtime: str
    precision: str
    tokens: int
    objective: Objective
    data: str
    data_sha256: str
    rows: int
    answers: int
    estimates: tuple[Estimate, ...]
    seconds: float
    comparison: Comparison | None = None

    def figure(self, name: str) -> Estimate:
        """The figure of this name: loss, perplexity, bits per byte or accuracy. Raises KeyError."""
        return {estimate.name: estimate for estimate in self.estimates}[name]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
