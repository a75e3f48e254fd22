"""The choice of the next token from the logits of a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from effexport.generation.sampling import Sampling

if TYPE_CHECKING:
    from effexport.dtypes import Array


def next_token(logits: Array, sampling: Sampling, generator: np.random.Generator) -> int | None:
    """The token that follows, or None if the largest logit is NaN or infinite. logits: float [vocab].

    Greedy, the first of the largest logits. Otherwise one number u from [0, 1) is drawn, and the token is the first at
    which the sum of the probabilities softmax(logits / temperature), in the order of the ids, exceeds u. With top_k,
    only the k largest logits count; of equal ones, those with the smaller ids.
    """
    best = int(logits.argmax())  # of NaN, if there is any
    peak = float(logits[best])
    if not math.isfinite(peak):
        return None
    if sampling.temperature == 0:
        return best
    ids = None if sampling.top_k is None or sampling.top_k >= len(logits) else largest(logits, sampling.top_k)
    scores = (logits if ids is None else logits[ids]).astype(np.float64)
    # in place, because this runs between any two steps of the model
    scores -= peak
    scores /= sampling.temperature
    sums = np.cumsum(np.exp(scores, out=scores), out=scores)
    # the product may round up to the last sum
    place = min(int(sums.searchsorted(generator.random() * sums[-1], side="right")), len(sums) - 1)
    return place if ids is None else int(ids[place])


def largest(scores: Array, count: int) -> Array:
    """The ids of the `count` largest scores, ascending; of equal scores, the smaller ids. scores: float [vocab]."""
    least = np.partition(scores, -count)[-count]
    above = np.flatnonzero(scores > least)
    ties = np.flatnonzero(scores == least)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))
