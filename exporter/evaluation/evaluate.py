"""Judges an artifact on labelled data, by itself or beside another model: what `effexport evaluate` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import open_artifact
from effexport.errors import UserError
from effexport.evaluation.estimates import Scores, changes, differences, estimates_of
from effexport.evaluation.files import rows_of_data
from effexport.evaluation.labelled import LabelledRows, Windows, objective_of, same_labels
from effexport.evaluation.results import LANGUAGE, Comparison, Evaluation
from effexport.evaluation.scores import Run, run_of_module, scores_of
from effexport.files import file_digest
from effexport.models.sources import ModelSource
from effexport.models.validation import did_you_mean
from effexport.proof.references.rebuilt_module import source_of_weights
from effexport.runners.artifact_runner import check_runtime, runner_from_artifact
from effexport.runners.runner import ModelOptions
from effexport.runtimes import ARTIFACT_RUNTIMES

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.dtypes import Array

TORCH = "torch"
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A model that is judged: an artifact in a runtime, or its PyTorch module (TORCH).

    weights: of the module, if they were not drawn from the seed.
    """

    artifact: Artifact
    runtime: str
    options: ModelOptions = field(default_factory=ModelOptions)
    source: ModelSource | None = None

    @property
    def title(self) -> str:
        return f"{self.artifact.path}, {self.runtime}"

    @contextmanager
    def opened(self) -> Iterator[Run]:
        """Raises UserError for a module or a runtime that is not available."""
        if self.runtime != TORCH:
            with runner_from_artifact(self.artifact, self.runtime, self.options) as runner:
                yield runner.run
            return
        yield run_of_module(self.artifact, self.source, f"--compare {TORCH}")


def other_subject(text: str, subject: Subject, weights: Path | None) -> Subject:
    """A parsed --compare: `torch`, PATH, @RUNTIME or PATH@RUNTIME. Raises UserError."""
    if text == TORCH:
        return Subject(subject.artifact, TORCH, source=source_of_weights(subject.artifact, weights))
    path, at, runtime = text.rpartition("@") if "@" in text else (text, "", subject.runtime)
    if at and runtime not in ARTIFACT_RUNTIMES:
        known = tuple(ARTIFACT_RUNTIMES)
        raise UserError(
            f"--compare {text}: unknown runtime {runtime!r}{did_you_mean(runtime, known)} Expected {TORCH}, PATH, "
            f"@RUNTIME or PATH@RUNTIME, with one of: {', '.join(known)}"
        )
    return Subject(open_artifact(Path(path)) if path else subject.artifact, runtime)


def evaluate_artifact(
    subject: Subject, data: Path | Mapping[str, Array], windows: Windows, other: Subject | None, on_stage: OnStage
) -> Evaluation:
    """Run the data through a model, and through another one. Raises UserError for data that does not fit a model."""
    check_runtime(subject.runtime, subject.options)
    objective = objective_of(subject.artifact.spec)
    language = objective in LANGUAGE
    rows = rows_of_data(data, subject.artifact, windows)
    other_rows = rows if other is None else rows_of_data(data, other.artifact, windows)
    if not same_labels(rows, other_rows):
        raise UserError(
            "the two models do not read the data as the same rows, so they cannot be compared row by row; expected "
            "models with the same tokenizer and length: set the length with --window"
        )
    scores, seconds = judged(subject, rows, on_stage)
    comparison = None
    if other is not None:
        found, took = judged(other, other_rows, on_stage)
        comparison = Comparison(
            other.title,
            tuple(estimates_of(found, language=language)),
            tuple(differences(scores, found, language=language)),
            changes(scores, found),
            took,
        )
    spec = subject.artifact.spec
    return Evaluation(
        subject.title,
        spec.attention.label,
        spec.to_dict(),
        subject.runtime,
        subject.options.precision_hint or spec.precision,
        max(some.tokens for some in rows),
        objective,
        str(data) if isinstance(data, Path) else "arrays",
        file_digest(data) if isinstance(data, Path) else "",
        len(scores.asked),
        int(scores.asked.sum()),
        tuple(estimates_of(scores, language=language)),
        seconds,
        comparison,
    )


def judged(subject: Subject, rows: Sequence[LabelledRows], on_stage: OnStage) -> tuple[Scores, float]:
    """The scores of a model, and the seconds of its runs."""
    on_stage(f"loading {subject.title}")
    with subject.opened() as run:
        on_stage(f"running {subject.title}")
        start = time.perf_counter()
        scores = scores_of(run, rows)
        return scores, time.perf_counter() - start
