"""The interface of a model under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from effexport.dtypes import Array

Arrays = Mapping[str, "Array"]
RunWithBuckets = Callable[[Arrays, Arrays], tuple[dict[str, "Array"], dict[str, "Array"]]]


class Candidate(Protocol):
    """A model under test, which chooses its own buckets in `run`."""

    def accepts(self, inputs: Arrays) -> bool:
        """Whether the model takes inputs of these shapes: an engine is built for a range of them."""

    def run(self, inputs: Arrays) -> dict[str, Array]: ...

    @property
    def run_with_buckets(self) -> RunWithBuckets | None:
        """Runs the model on inputs and the buckets of every hash, by value name, and returns the outputs and the
        buckets that the model would have chosen; None if the model does not show its buckets."""
