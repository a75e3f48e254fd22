"""Questions to pipelines of transformers, and how far two answers are apart. Also imported in .venv-transformers5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import effexport

TEXTS = ["Paris is the capital of France.", "It's asleep."]
MASKED = ["Paris is the [MASK] of France, and Lyon is not.", "It's [MASK]."]
# A text to classify against labels needs a model that knows entailment; FIELDS in checkpoint_artifacts.py name it.
PIPELINES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("fill-mask", "NystromformerForMaskedLM", lambda ask: ask(MASKED, batch_size=2)),
    (
        "question-answering",
        "NystromformerForQuestionAnswering",
        lambda ask: ask(question=["What is Lyon not?", "Who?"], context=TEXTS, top_k=3, batch_size=2),
    ),
    (
        "text-classification",
        "NystromformerForSequenceClassification",
        lambda ask: ask(TEXTS, top_k=None, batch_size=2),
    ),
    (
        "zero-shot-classification",
        "NystromformerForSequenceClassification",
        lambda ask: ask(TEXTS, candidate_labels=["fox", "dog"]),
    ),
    ("token-classification", "NystromformerForTokenClassification", lambda ask: ask(TEXTS, batch_size=2)),
    ("feature-extraction", "NystromformerModel", lambda ask: ask(TEXTS)),
]
# transformers 5 has no question-answering any more, and its tokenizers do not tell the texts of a pair apart, which a
# model of entailment needs.
TRANSFORMERS_5 = [row for row in PIPELINES if row[0] not in ("question-answering", "zero-shot-classification")]


def worst_difference(ours: Any, theirs: Any) -> float:
    """The largest difference of numbers in two nested answers. Everything else must be equal."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        return max(worst_difference(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        return max(map(worst_difference, ours, theirs), default=0.0)
    if isinstance(theirs, float | np.floating):
        return abs(float(ours) - float(theirs))
    assert ours == theirs
    return 0.0


def likeliest_tokens(artifact: str | Path, ids: np.ndarray, count: int) -> list[list[int]]:
    """The tokens of a prompt [1, seq] and `count` more, each the likeliest after all before it."""
    with effexport.load(artifact) as runner:
        for _ in range(count):
            scores = runner.run({"input_ids": ids})["logits"][:, -1]
            ids = np.concatenate([ids, scores.argmax(-1)[:, None]], axis=1)
    return ids.tolist()
