"""Whether a model gives PyTorch's answers on data, and how good both are: what `effexport verify --data` adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import RuntimeFailedError
from effexport.evaluation.estimates import Quality, Scores, changes, differences, estimates_of
from effexport.evaluation.files import rows_of_data
from effexport.evaluation.labelled import IGNORED, Windows, objective_of
from effexport.evaluation.results import LANGUAGE, Objective
from effexport.evaluation.scores import Run, joined, run_of_module, scores_of_logits
from effexport.files import file_digest
from effexport.models.encoder.spec import LOGITS
from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import Check, Kind, judged
from effexport.proof.tolerances import Limit, arithmetic_limit
from effexport.runners.artifact_runner import model_opener, runner_from_artifact
from effexport.runners.feeds import limits_from_spec

if TYPE_CHECKING:
    from pathlib import Path

    from effexport.dtypes import Array
    from effexport.proof.verify_artifact import Candidate, Request

CHANGED = "answers that changed"


def answer_checks(
    candidate: Candidate, request: Request, on_stage: Callable[[str], None]
) -> tuple[list[Check], Quality | None]:
    """How many of the most probable answers on the data of the request are not PyTorch's, and whether those were nearly
    tied there; and the figures of both. No checks without data, and no figures if the model cannot be judged. A
    quantised model is compared with the float module.

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
    with opened(candidate) as run:
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
def opened(candidate: Candidate) -> Iterator[Run]:
    """What runs the model under test, or its engine."""
    artifact, options = candidate.artifact, candidate.options
    if candidate.is_engine:
        with runner_from_artifact(artifact, candidate.runtime, options) as runner:
            yield runner.run
        return
    open_model = model_opener(candidate.runtime, options)
    with open_model(candidate.path, limits_from_spec(artifact.spec), None) as runner:
        yield runner.run


def widest_gap(logits: Array, labels: Array, best: Array, chosen: Array) -> float:
    """How far PyTorch's logits of other answers are below those of its own, relative to the RMS of all logits, or of
    the place's own if that is larger, as in `metrics.relative_error`; 0 if no answer changed.

    logits: PyTorch's, [rows, classes] or [rows, tokens, classes]. best, chosen: PyTorch's answers where a label is, and
    the other ones, [asked].
    """
    places = np.flatnonzero(best != chosen)
    if not len(places):
        return 0.0
    wanted = logits[labels != IGNORED].astype(np.float64)
    squares = np.square(wanted).mean(axis=-1)
    scales = np.sqrt(np.maximum(squares[places], squares.mean()))
    gaps = wanted[places, best[places]] - wanted[places, chosen[places]]
    return float((gaps / scales).max())
