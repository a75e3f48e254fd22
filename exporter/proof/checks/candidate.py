"""What is under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from effexport.dtypes import Array

Arrays = Mapping[str, "Array"]
RunWithBuckets = Callable[[Arrays, Arrays], tuple[dict[str, "Array"], dict[str, "Array"]]]


class Candidate(Protocol):
    """A model under test. `run` is free; `run_with_buckets` takes the buckets of every hash by value name and also
    returns the buckets it would have chosen; it is None when the model does not show them. `accepts` tells whether the
    model takes inputs of these shapes: an engine is built for a range of them."""

    def accepts(self, inputs: Mapping[str, Array]) -> bool: ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...

    @property
    def run_with_buckets(
        self,
    ) -> RunWithBuckets | None: ...
