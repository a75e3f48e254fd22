"""Requests that arrive together run together: those of one shape become one batch.

Part of what a Python model of Triton carries: it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import EffexportError
from effexport.runners import checked_feeds

if TYPE_CHECKING:
    from effexport.runners import Array
    from effexport.runners.ort.runner import OrtRunner

Answer = dict[str, "Array"] | EffexportError


def run_merged(runner: OrtRunner, requests: Sequence[Mapping[str, Array]], *, merge: bool) -> list[Answer]:
    """The outputs of each request, or what is wrong with it. A bad request spoils no other one.

    merge: False runs each on its own, for models whose samples depend on their batch mates.
    """
    answers: list[Answer | None] = [None] * len(requests)
    groups: dict[object, list[tuple[int, dict[str, Array]]]] = {}
    for i, request in enumerate(requests):
        try:
            feeds = checked_feeds(request, runner.inputs, runner.limits)
        except EffexportError as error:
            answers[i] = error
        else:
            shape = tuple((name, value.shape[1:]) for name, value in feeds.items())
            groups.setdefault(shape if merge else i, []).append((i, feeds))
    for group in groups.values():
        for (i, _), answer in zip(group, run_group(runner, [feeds for _, feeds in group]), strict=True):
            answers[i] = answer
    return [answer for answer in answers if answer is not None]


def run_group(runner: OrtRunner, group: Sequence[Mapping[str, Array]]) -> list[Answer]:
    """Requests of one shape as one batch."""
    batch = {name: np.concatenate([feeds[name] for feeds in group]) for name in group[0]}
    try:
        outputs = runner.run(batch)
    except EffexportError as error:
        return [error] * len(group)
    rows = [len(next(iter(feeds.values()))) for feeds in group]
    ends = np.cumsum(rows)
    return [
        {name: value[end - count : end] for name, value in outputs.items()}
        for count, end in zip(rows, ends, strict=True)
    ]
