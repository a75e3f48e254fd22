"""What quantisation costs a model at its task: the figures of the float module and of the file on labelled data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import UserError
from effexport.evaluation.estimates import ACCURACY, LOSS, estimates_of
from effexport.evaluation.files import rows_of_data
from effexport.evaluation.labelled import LabelledRows, Windows
from effexport.evaluation.scores import Run, scores_of
from effexport.quantize.record import TaskFigure
from effexport.runners.feeds import checked_feeds, limits_from_spec

if TYPE_CHECKING:
    from effexport.artifact import Artifact


@dataclass
class TaskData:
    """The labelled data of --evaluate. rows: read when the tokenizer of the model is there."""

    path: Path
    rows: list[LabelledRows] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise UserError(f"--evaluate names {self.path}, which is no file; expected a text, .jsonl or .npz")

    def read(self, artifact: Artifact) -> None:
        """Raises UserError for data that does not fit the model."""
        spec, limits = artifact.spec, limits_from_spec(artifact.spec)
        self.rows = [
            LabelledRows(checked_feeds(some.feeds, spec.inputs, limits), some.labels, some.text_bytes)
            for some in rows_of_data(self.path, artifact, Windows())
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and tokens of the longest."""
        return sum(len(some.labels) for some in self.rows), max(some.tokens for some in self.rows)

    def figures(self, run: Run) -> dict[str, float]:
        """The figures of a model by name."""
        scores = scores_of(run, self.rows)
        return {found.name: found.value for found in estimates_of(scores, language=scores.text_bytes is not None)}

    def loss(self, exact: Run, quantized: Run) -> float:
        """The relative increase of the loss from one model to another."""
        return relative_loss(LOSS, self.figures(exact)[LOSS], self.figures(quantized)[LOSS])

    def compared(self, exact: Run, quantized: Run) -> Sequence[TaskFigure]:
        """Every figure of both."""
        of_float, found = self.figures(exact), self.figures(quantized)
        return [
            TaskFigure(
                name=name,
                float_value=of_float[name],
                quantized_value=found[name],
                relative_loss=relative_loss(name, of_float[name], found[name]),
            )
            for name in of_float
        ]


def relative_loss(name: str, exact: float, found: float) -> float:
    """By how much a figure is worse, as a share of that of the float model. Of all figures, only accuracy falls."""
    change = exact - found if name == ACCURACY else found - exact
    return change / max(abs(exact), float(np.finfo(np.float32).tiny))
