"""Figures with confidence intervals, of one model and of the difference between two on the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from effexport.base.records import Figure, figure

if TYPE_CHECKING:
    from effexport.base.dtypes import Array


# Of a normal distribution, on both sides of 95 %.
DEVIATIONS = 1.96
LOSS, PERPLEXITY, BITS, ACCURACY = "loss", "perplexity", "bits per byte", "accuracy"


@dataclass(frozen=True)
class Estimate:
    """A figure and the ends of its 95 % confidence interval, which a single row does not have."""

    name: str
    value: Figure
    low: Figure | None = None
    high: Figure | None = None

    def __post_init__(self) -> None:
        for end in ("value", "low", "high"):
            object.__setattr__(self, end, figure(getattr(self, end)))

    @property
    def interval(self) -> tuple[float, ...]:
        """Both ends; empty without them."""
        return () if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Changes:
    """Answers that differ between two models.

    count: those that differ.
    of: all of them.
    """

    count: int
    of: int

    @property
    def share(self) -> float:
        return self.count / self.of


@dataclass(frozen=True)
class Quality:
    """The figures of a model and of its PyTorch module on the same data."""

    data: Annotated[str, Meta(description="The file, as it was named.")]
    data_sha256: str
    objective: Annotated[str, Meta(description="What the logits predict, such as language model or classification.")]
    rows: int
    estimates: Annotated[tuple[Estimate, ...], Meta(description="Of the model.")]
    pytorch: tuple[Estimate, ...]
    differences: Annotated[tuple[Estimate, ...], Meta(description="The model's minus PyTorch's, row by row.")]
    changes: Annotated[Changes, Meta(description="The most probable answers that are not PyTorch's.")]


@dataclass(frozen=True)
class Scores:
    """Of each row, [rows]: nats, the negative log-probability of all its right answers; asked, how many there are;
    right, how many of them are the model's own; text_bytes, of the text that they stand for, None if unknown.

    answers: the model's own, for all labels of all rows, in their order.
    """

    nats: Array
    asked: Array
    right: Array
    text_bytes: Array | None
    answers: Array


def estimates_of(scores: Scores, *, language: bool) -> list[Estimate]:
    """loss, in nats per answer, and accuracy; of language models also perplexity, and bits per byte if they are known.

    The intervals take rows for independent of each other, and answers within a row not.
    """
    loss = ratio(LOSS, scores.nats, scores.asked)
    found = [loss, share(ACCURACY, scores.right, scores.asked)]
    if language:
        found.insert(1, transformed(PERPLEXITY, loss, exponential))
        if scores.text_bytes is not None and scores.text_bytes.sum():
            found.insert(0, ratio(BITS, scores.nats / math.log(2), scores.text_bytes))
    return found


def differences(first: Scores, second: Scores, *, language: bool) -> list[Estimate]:
    """The figures of the first minus those of the second, row by row."""
    nats = first.nats - second.nats
    found = [ratio(LOSS, nats, first.asked), ratio(ACCURACY, first.right - second.right, first.asked)]
    if language and first.text_bytes is not None and first.text_bytes.sum():
        found.insert(0, ratio(BITS, nats / math.log(2), first.text_bytes))
    return found


def changes(first: Scores, second: Scores) -> Changes:
    """The answers to the same rows that differ."""
    return Changes(int((first.answers != second.answers).sum()), len(first.answers))


def ratio(name: str, values: Array, sizes: Array) -> Estimate:
    """Σ values / Σ sizes, both [rows], with the interval of a ratio of two means."""
    value = float(values.sum() / sizes.sum())
    error = standard_error(values, sizes, value)
    if error is None:
        return Estimate(name, value)
    return Estimate(name, value, value - DEVIATIONS * error, value + DEVIATIONS * error)


def share(name: str, hits: Array, sizes: Array) -> Estimate:
    """Σ hits / Σ sizes, between 0 and 1, with Wilson's interval for as many independent answers as its standard error
    amounts to; for as many as there are rows if every row has the same share."""
    value = float(hits.sum() / sizes.sum())
    error = standard_error(hits, sizes, value)
    if error is None:
        return Estimate(name, value)
    count = value * (1 - value) / error**2 if error else len(sizes)
    square = DEVIATIONS**2 / count
    center = (value + square / 2) / (1 + square)
    width = DEVIATIONS * math.sqrt(value * (1 - value) / count + square / (4 * count)) / (1 + square)
    return Estimate(name, value, max(0.0, center - width), min(1.0, center + width))


def standard_error(values: Array, sizes: Array, value: float) -> float | None:
    """Of Σ values / Σ sizes; None for a single row."""
    rows = len(sizes)
    if rows < 2:
        return None
    deviations = values - value * sizes
    return float(math.sqrt(rows / (rows - 1) * float((deviations**2).sum())) / sizes.sum())


def exponential(value: float) -> float:
    """e to a power; infinite beyond float64."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def transformed(name: str, estimate: Estimate, change: Callable[[float], float]) -> Estimate:
    """change: monotonic."""
    return Estimate(name, *map(change, (estimate.value, *estimate.interval)))


class Objective(StrEnum):
    """The subject that the logits of a model predict."""

    LANGUAGE_MODEL = "language model"  # the next token
    MASKED_LANGUAGE_MODEL = "masked language model"  # the token in a masked place
    SEQ2SEQ = "sequence to sequence"  # the next token of a target
    CLASSIFICATION = "classification"  # the class of a row
    TOKEN_CLASSIFICATION = "token classification"  # the class of each token


# Those whose answers are words, and whose loss has a perplexity.
LANGUAGE = (Objective.LANGUAGE_MODEL, Objective.MASKED_LANGUAGE_MODEL, Objective.SEQ2SEQ)


@dataclass(frozen=True)
class ComparedModel:
    """Another model on the same rows. differences: the figures of the first model minus those of this one."""

    model: str
    estimates: tuple[Estimate, ...]
    differences: tuple[Estimate, ...]
    changes: Changes
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """The quality of a model on labelled data.

    label: the attention, as benchmarks call it.
    spec: of the artifact, as its manifest has it.
    precision: of the computation.
    tokens: of the longest row.
    data_sha256: of a file, "" for arrays.
    answers: the number of labels.
    seconds: of the runs.
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
    comparison: ComparedModel | None = None

    def figure(self, name: str) -> Estimate:
        """The figure of this name: loss, perplexity, bits per byte or accuracy. Raises KeyError."""
        return {estimate.name: estimate for estimate in self.estimates}[name]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
