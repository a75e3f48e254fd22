"""What a model makes of labelled rows: the probability of the right answers, and its own answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import RuntimeFailedError, Unavailable, UserError
from effexport.evaluation.estimates import Scores
from effexport.evaluation.labelled import IGNORED, LabelledRows
from effexport.models.encoder.spec import LOGITS
from effexport.models.sources import ModelSource
from effexport.proof.module_runs import run_module
from effexport.proof.references.rebuilt_module import model_of_artifact
from effexport.runners.feeds import checked_feeds, limits_from_spec

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.dtypes import Array

# Inputs by name → outputs by name.
Run = Callable[[Mapping[str, "Array"]], Mapping[str, "Array"]]


def run_of_module(artifact: Artifact, source: ModelSource | None, option: str) -> Run:
    """What runs the PyTorch module of an artifact. Raises UserError, which names the option, if it is not available."""
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
