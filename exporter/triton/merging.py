"""Requests that arrive together: those of one shape run as one batch.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from effexport.errors import EffexportError
from effexport.runners.feeds import checked_feeds
from effexport.runners.joining import joined_feeds, joining_key, split_outputs

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.ort.runner import OrtRunner

Answer = Mapping[str, "Array"] | EffexportError


def run_merged(runner: OrtRunner, requests: Sequence[Mapping[str, Array]], *, merge: bool) -> list[Answer]:
    """The outputs of each request, or its error. A bad request does not affect the others.

    merge: False runs each request on its own, for models whose results depend on the rest of the batch.
    """
    answers: list[Answer | None] = [None] * len(requests)
    groups: dict[object, list[tuple[int, dict[str, Array]]]] = {}
    for i, request in enumerate(requests):
        try:
            feeds = checked_feeds(request, runner.inputs, runner.limits)
        except EffexportError as error:
            answers[i] = error
        else:
            groups.setdefault(joining_key(feeds) if merge else i, []).append((i, feeds))
    for group in groups.values():
        for (i, _), answer in zip(group, run_group(runner, [feeds for _, feeds in group]), strict=True):
            answers[i] = answer
    return [answer for answer in answers if answer is not None]


def run_group(runner: OrtRunner, group: Sequence[Mapping[str, Array]]) -> Sequence[Answer]:
    """The outputs of requests of one shape, run as one batch."""
    try:
        outputs = runner.run(joined_feeds(group))
    except EffexportError as error:
        return [error] * len(group)
    return split_outputs(outputs, [len(next(iter(feeds.values()))) for feeds in group])
