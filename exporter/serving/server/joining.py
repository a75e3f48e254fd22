"""Which requests may share a run: joined along the batch axis, and taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.runners import Array

Key = tuple[tuple[int, ...], ...]


def why_not_joined(spec: BuildSpec) -> str:
    """Why requests never share a run; "" where the parity check has shown that batch mates change nothing."""
    reason = spec.model.why_not_invariant
    if reason:
        return reason
    tensors = (*spec.inputs, *spec.outputs)
    return (
        "" if all(t.dims[:1] == ("batch",) for t in tensors) else "not every input and output begins with a batch axis"
    )


def joining_key(feeds: Mapping[str, Array]) -> Key:
    """Equal for requests that differ in their rows alone. feeds: complete, so all have the same names."""
    return tuple(feeds[name].shape[1:] for name in sorted(feeds))


def joined_feeds(feeds: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    import numpy as np

    if len(feeds) == 1:
        return feeds[0]
    return {name: np.concatenate([one[name] for one in feeds]) for name in feeds[0]}


def split_outputs(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[Mapping[str, Array]]:
    """One set of views for each request."""
    if len(rows) == 1:
        return [outputs]
    parts: list[Mapping[str, Array]] = []
    start = 0
    for count in rows:
        parts.append({name: array[start : start + count] for name, array in outputs.items()})
        start += count
    return parts
