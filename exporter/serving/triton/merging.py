"""Requests that arrive together: those of one shape run as one batch.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from effexport.errors import EffexportError
from effexport.runners.feeds import checked_feeds
from effexport.runners.joining import Key, joined_feeds, joining_key, rows_of, split_outputs

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.ort.runner import OrtRunner

Answer = Mapping[str, "Array"] | EffexportError
# The number of a request, and its checked feeds.
Member = tuple[int, Mapping[str, "Array"]]


def run_merged(runner: OrtRunner, requests: Sequence[Mapping[str, Array]], max_batch: int) -> list[Answer]:
    """The outputs of each request, or its error. A bad request does not affect the others.

    max_batch: rows that run together, unless one request has more; 0 runs each request on its own, for models whose
    results depend on the rest of the batch.
    """
    answers: list[Answer | None] = [None] * len(requests)
    of_shape: dict[Key, list[Member]] = {}
    for i, request in enumerate(requests):
        try:
            feeds = checked_feeds(request, runner.inputs, runner.limits)
        except EffexportError as error:
            answers[i] = error
        else:
            of_shape.setdefault(joining_key(feeds), []).append((i, feeds))
    for group in (group for members in of_shape.values() for group in batches(members, max_batch)):
        for (i, _), answer in zip(group, run_group(runner, [feeds for _, feeds in group]), strict=True):
            answers[i] = answer
    return [answer for answer in answers if answer is not None]


def batches(members: Sequence[Member], max_batch: int) -> Iterator[list[Member]]:
    """Requests of one shape in groups of at most `max_batch` rows; of one request, if it has more."""
    group: list[Member] = []
    rows = 0
    for member in members:
        count = rows_of(member[1])
        if group and rows + count > max_batch:
            yield group
            group, rows = [], 0
        group.append(member)
        rows += count
    yield group


def run_group(runner: OrtRunner, group: Sequence[Mapping[str, Array]]) -> Sequence[Answer]:
    """The outputs of requests of one shape, run as one batch."""
    try:
        outputs = runner.run(joined_feeds(group))
    except EffexportError as error:
        return [error] * len(group)
    return split_outputs(outputs, [rows_of(feeds) for feeds in group])
