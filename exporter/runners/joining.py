"""Requests that share a run: joined along the batch axis, and their outputs taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.dtypes import Array

Key = tuple[tuple[int, ...], ...]


def joining_key(feeds: Mapping[str, Array]) -> Key:
    """Equal for requests that differ only in their number of rows. feeds: all inputs of the model."""
    return tuple(feeds[name].shape[1:] for name in sorted(feeds))


def joined_feeds(feeds: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """The feeds of several requests as one batch."""
    import numpy as np

    if len(feeds) == 1:
        return feeds[0]
    return {name: np.concatenate([one[name] for one in feeds]) for name in feeds[0]}


def split_outputs(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[Mapping[str, Array]]:
    """The outputs of each request, as views. rows: of each request."""
    if len(rows) == 1:
        return [outputs]
    parts: list[Mapping[str, Array]] = []
    start = 0
    for count in rows:
        parts.append({name: array[start : start + count] for name, array in outputs.items()})
        start += count
    return parts
