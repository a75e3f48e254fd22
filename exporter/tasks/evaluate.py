"""Models judged on labelled data: alone, beside another model, beside PyTorch, and quantised beside float."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.artifact import open_artifact
from effexport.base.errors import RuntimeFailedError, Unavailable, UserError
from effexport.base.files import file_digest
from effexport.base.runtimes import ARTIFACT_RUNTIMES
from effexport.models.encoder.spec import LOGITS
from effexport.models.sources import ModelSource
from effexport.models.validation import did_you_mean
from effexport.proof.check import CaseLabel, Check, Kind, Limit, judged
from effexport.proof.module_runs import run_module
from effexport.proof.rebuilt_module import model_of_artifact, source_of_weights
from effexport.proof.tolerances import arithmetic_limit
from effexport.quantize.record import TaskFigure
from effexport.runners.artifact_runner import model_opener, runner_from_artifact
from effexport.runners.options import RunOptions
from effexport.runners.runner import checked_feeds, limits_from_spec, limits_of_runner
from effexport.tasks.data import IGNORED, LabelledRows, Windows, objective_of, rows_of_data, same_labels
from effexport.tasks.figures import (
    ACCURACY,
    LANGUAGE,
    LOSS,
    ComparedModel,
    Evaluation,
    Objective,
    Quality,
    Scores,
    changes,
    differences,
    estimates_of,
)

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.base.dtypes import Array
    from effexport.proof.verify import ArtifactCandidate
    from effexport.proof.verify_artifact import VerifyRequest


# Inputs by name → outputs by name.
Run = Callable[[Mapping[str, "Array"]], Mapping[str, "Array"]]


def run_of_module(artifact: Artifact, source: ModelSource | None, option: str) -> Run:
    """A function that runs the PyTorch module of an artifact.

    option: its name in the error.
    Raises UserError if the module is not available.
    """
    model = model_of_artifact(artifact, source)
    if isinstance(model, Unavailable):
        raise UserError(f"{option}: {model}")
    spec, limits = artifact.spec, limits_from_spec(artifact.spec)
    return lambda feeds: run_module(model.module, spec, checked_feeds(feeds, spec.inputs, limits))


def scores_of(run: Run, data: Sequence[LabelledRows]) -> Scores:
    """Run a model on all rows, at least one.

    Raises UserError for labels that the model does not have, and RuntimeFailedError for logits that are not finite.
    """
    return joined([scores_of_logits(run(rows.feeds)[LOGITS], rows) for rows in data])


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of all rows of several parts, at least one, in their order."""
    text_bytes = [part.text_bytes for part in parts if part.text_bytes is not None]
    return Scores(
        np.concatenate([part.nats for part in parts]),
        np.concatenate([part.asked for part in parts]),
        np.concatenate([part.right for part in parts]),
        np.concatenate(text_bytes) if len(text_bytes) == len(parts) else None,
        np.concatenate([part.answers for part in parts]),
    )


def scores_of_logits(logits: Array, rows: LabelledRows) -> Scores:
    """logits: [rows, classes] or [rows, tokens, classes]."""
    wanted, labels = asked_logits(logits, rows.labels)
    count = len(rows.labels)
    of_row = np.nonzero(rows.labels != IGNORED)[0]
    peaks = wanted.max(axis=-1)
    sums = np.log(np.exp(wanted - peaks[:, None]).sum(axis=-1)) + peaks
    nats = sums - np.take_along_axis(wanted, labels[:, None], axis=-1)[:, 0]
    answers = wanted.argmax(axis=-1).astype(np.int32)
    return Scores(
        np.bincount(of_row, nats, count),
        np.bincount(of_row, minlength=count),
        np.bincount(of_row, answers == labels, count).astype(np.int64),
        rows.text_bytes,
        answers,
    )


def asked_logits(logits: Array, labels: Array) -> tuple[Array, Array]:
    """The logits [asked, classes], in float64, of the places that have a label, and these labels [asked].

    Raises UserError for a label that is no class, and RuntimeFailedError for logits that are not finite.
    """
    chosen = labels != IGNORED
    wanted, found = logits[chosen].astype(np.float64), labels[chosen]
    classes = logits.shape[-1]
    wrong = (found < 0) | (found >= classes)
    if wrong.any():
        raise UserError(
            f"the labels contain {found[wrong][0]}; expected 0 to {classes - 1}, or {IGNORED} for no answer"
        )
    if not np.isfinite(wanted).all():
        raise RuntimeFailedError(f"the {LOGITS} contain NaN or infinity, so no answer can be judged")
    return wanted, found


TORCH = "torch"
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that is timed_scores: an artifact in a runtime, or its PyTorch module (TORCH).

    weights: of the module, if they were not drawn from the seed.
    """

    artifact: Artifact
    options: RunOptions
    source: ModelSource | None = None

    @property
    def runtime(self) -> str:
        return self.options.runtime

    @property
    def title(self) -> str:
        return f"{self.artifact.path}, {self.runtime}"

    @contextmanager
    def opened(self) -> Iterator[Run]:
        """Raises UserError for a module or a runtime that is not available."""
        if self.runtime != TORCH:
            with runner_from_artifact(self.artifact, self.options) as runner:
                yield runner.run
            return
        yield run_of_module(self.artifact, self.source, f"--compare {TORCH}")


def other_subject(text: str, subject: EvaluatedModel, weights: Path | None) -> EvaluatedModel:
    """A parsed --compare: `torch`, PATH, @RUNTIME or PATH@RUNTIME. Raises UserError."""
    if text == TORCH:
        return EvaluatedModel(
            subject.artifact, RunOptions(runtime=TORCH), source=source_of_weights(subject.artifact, weights)
        )
    path, at, runtime = text.rpartition("@") if "@" in text else (text, "", subject.runtime)
    if at and runtime not in ARTIFACT_RUNTIMES:
        known = tuple(ARTIFACT_RUNTIMES)
        raise UserError(
            f"--compare {text}: unknown runtime {runtime!r}{did_you_mean(runtime, known)} Expected {TORCH}, PATH, "
            f"@RUNTIME or PATH@RUNTIME, with one of: {', '.join(known)}"
        )
    return EvaluatedModel(open_artifact(Path(path)) if path else subject.artifact, RunOptions(runtime=runtime))


def evaluate_artifact(
    subject: EvaluatedModel,
    data: Path | Mapping[str, Array],
    windows: Windows,
    other: EvaluatedModel | None,
    on_stage: OnStage,
) -> Evaluation:
    """Run the data through a model, and through another one. Raises UserError for data that does not fit a model."""
    objective = objective_of(subject.artifact.spec)
    language = objective in LANGUAGE
    rows = rows_of_data(data, subject.artifact, windows)
    other_rows = rows if other is None else rows_of_data(data, other.artifact, windows)
    if not same_labels(rows, other_rows):
        raise UserError(
            "the two models do not read the data as the same rows, so they cannot be compared row by row; expected "
            "models with the same tokenizer and length: set the length with --window"
        )
    scores, seconds = timed_scores(subject, rows, on_stage)
    comparison = None
    if other is not None:
        found, took = timed_scores(other, other_rows, on_stage)
        comparison = ComparedModel(
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


def timed_scores(subject: EvaluatedModel, rows: Sequence[LabelledRows], on_stage: OnStage) -> tuple[Scores, float]:
    """The scores of a model, and the seconds of its runs."""
    on_stage(f"loading {subject.title}")
    with subject.opened() as run:
        on_stage(f"running {subject.title}")
        start = time.perf_counter()
        scores = scores_of(run, rows)
        return scores, time.perf_counter() - start


CHANGED = "answers that changed"


def answer_checks(
    candidate: ArtifactCandidate, request: VerifyRequest, on_stage: Callable[[str], None]
) -> tuple[list[Check], Quality | None]:
    """Checks of the most probable answers on the data of the request against PyTorch's, and the figures of both.

    The checks count the answers that changed, and measure how nearly they were tied. There are none without data, and
    no figures if the model cannot be judged. A quantised model is compared with the float module.

    Raises UserError for data that does not fit the model, and without the module.
    """
    if request.data is None:
        return [], None
    candidate.check()
    artifact, spec, data = candidate.artifact, candidate.artifact.spec, request.data
    rows = rows_of_data(data, artifact, Windows())
    on_stage(f"comparing the answers to {data}")
    run_torch = run_of_module(artifact, request.source, "--data compares with PyTorch")
    label = CaseLabel(data.name, (sum(len(some.labels) for some in rows), max(some.tokens for some in rows)))
    parts, torch_parts, widest = [], [], 0.0
    with opened_candidate(candidate) as run:
        for some in rows:
            expected = run_torch(some.feeds)[LOGITS]
            torch_parts.append(scores_of_logits(expected, some))
            try:
                parts.append(scores_of_logits(run(some.feeds)[LOGITS], some))
            except RuntimeFailedError as error:
                return [Check(Kind.ANSWERS, label, CHANGED, "failed", detail=str(error))], None
            widest = max(widest, widest_gap(expected, some.labels, torch_parts[-1].answers, parts[-1].answers))
    quality = quality_of(data, objective_of(spec), joined(parts), joined(torch_parts))
    changed = quality.changes
    detail = f"{changed.count:,} of {changed.of:,} answers changed"
    count = Check(Kind.ANSWERS, label, CHANGED, "passed", float(changed.count), detail=detail)
    if artifact.manifest.hash_values or spec.is_quantized:
        # other buckets change answers for good reasons, which the free run judges, and so does quantisation
        return [count], quality
    limit = arithmetic_limit(spec)
    twice = Limit(2 * limit.value, f"two logits, each of them off by what the arithmetic may be: {limit.reason}")
    ties = judged(Kind.ANSWER_NEAR_TIES, label, "widest gap of a changed answer / RMS", widest, twice, detail)
    return [count, ties], quality


def quality_of(data: Path, objective: Objective, scores: Scores, pytorch: Scores) -> Quality:
    """The figures of a model and of PyTorch. data: the file that both were run on."""
    language = objective in LANGUAGE
    return Quality(
        str(data),
        file_digest(data),
        objective,
        len(scores.asked),
        tuple(estimates_of(scores, language=language)),
        tuple(estimates_of(pytorch, language=language)),
        tuple(differences(scores, pytorch, language=language)),
        changes(scores, pytorch),
    )


@contextmanager
def opened_candidate(candidate: ArtifactCandidate) -> Iterator[Run]:
    """A function that runs the model under test, or its engine."""
    artifact, options = candidate.artifact, candidate.options
    if candidate.is_engine:
        with runner_from_artifact(artifact, options) as runner:
            yield runner.run
        return
    open_model = model_opener(options)
    with open_model(candidate.path, limits_of_runner(artifact.spec), None) as runner:
        yield runner.run


def widest_gap(logits: Array, labels: Array, best: Array, chosen: Array) -> float:
    """The widest gap between PyTorch's logits of its own answers and of the others, relative to the RMS of all logits,
    or of the place's own if that is larger, as in `relative_error`; 0 if no answer changed.

    logits: PyTorch's, [rows, classes] or [rows, tokens, classes].
    best, chosen: PyTorch's answers where a label is, and the other ones, [asked].
    """
    places = np.flatnonzero(best != chosen)
    if not len(places):
        return 0.0
    wanted = logits[labels != IGNORED].astype(np.float64)
    squares = np.square(wanted).mean(axis=-1)
    scales = np.sqrt(np.maximum(squares[places], squares.mean()))
    gaps = wanted[places, best[places]] - wanted[places, chosen[places]]
    return float((gaps / scales).max())


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
    """The share of the float model's figure by which another is worse. Of all figures, only accuracy falls."""
    change = exact - found if name == ACCURACY else found - exact
    return change / max(abs(exact), float(np.finfo(np.float32).tiny))
