"""Whether a model gives PyTorch's answers on data: what `effexport verify --data` adds to the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import RuntimeFailedError, Unavailable, UserError
from effexport.evaluation.files import rows_of_data
from effexport.evaluation.labelled import Windows
from effexport.evaluation.scores import Run, asked_logits
from effexport.models.head_spec import LOGITS
from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import Check, Kind, judged
from effexport.proof.module_runs import run_module
from effexport.proof.references.rebuilt_module import module_of_artifact
from effexport.proof.tolerances import Limit, arithmetic_limit
from effexport.runners.artifact_runner import model_opener, runner_from_artifact
from effexport.runners.feeds import checked_feeds, limits_from_spec

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.verify_artifact import Candidate, Request

CHANGED = "answers that changed"


def answer_checks(candidate: Candidate, request: Request, on_stage: Callable[[str], None]) -> list[Check]:
    """How many of the most probable answers on the data of the request are not PyTorch's, and whether those were nearly
    tied there. No checks without data.

    Raises UserError for data that does not fit the model, and without the module.
    """
    if request.data is None:
        return []
    candidate.check()
    artifact, spec, data = candidate.artifact, candidate.artifact.spec, request.data
    rows = rows_of_data(data, artifact, Windows())
    on_stage(f"comparing the answers to {data}")
    module = module_of_artifact(artifact, request.weights)
    if isinstance(module, Unavailable):
        raise UserError(f"--data compares with PyTorch: {module}")
    label = CaseLabel(
        data.name,
        (sum(len(some.labels) for some in rows), max(len(next(iter(some.feeds.values()))[0]) for some in rows)),
    )
    changed, asked, widest, limits = 0, 0, 0.0, limits_from_spec(spec)
    with opened(candidate) as run:
        for some in rows:
            expected = run_module(module, spec, checked_feeds(some.feeds, spec.inputs, limits))
            wanted, _ = asked_logits(expected[LOGITS], some.labels)
            try:
                found, _ = asked_logits(run(some.feeds)[LOGITS], some.labels)
            except RuntimeFailedError as error:
                return [Check(Kind.ANSWERS, label, CHANGED, "failed", detail=str(error))]
            best, chosen = wanted.argmax(-1), found.argmax(-1)
            places = np.flatnonzero(best != chosen)
            changed, asked = changed + len(places), asked + len(best)
            if len(places):
                gaps = wanted[places, best[places]] - wanted[places, chosen[places]]
                widest = max(widest, float((gaps / scale_of(wanted)[places]).max()))
    detail = f"{changed:,} of {asked:,} answers changed"
    count = Check(Kind.ANSWERS, label, CHANGED, "passed", float(changed), detail=detail)
    if artifact.manifest.hash_values:
        # other buckets change answers for good reasons, which the free run judges
        return [count]
    limit = arithmetic_limit(spec)
    twice = Limit(2 * limit.value, f"two logits, each of them off by what the arithmetic may be: {limit.reason}")
    return [count, judged(Kind.ANSWER_NEAR_TIES, label, "widest gap of a changed answer / RMS", widest, twice, detail)]


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


def scale_of(logits: Array) -> Array:
    """[asked]: the RMS of all logits, or of the place's own if that is larger, as in `metrics.relative_error`."""
    squares = np.square(logits)
    scales: Array = np.sqrt(np.maximum(squares.mean(axis=-1), squares.mean()))
    return scales
