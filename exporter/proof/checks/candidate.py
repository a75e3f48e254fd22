"""The interface of a model under test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from effexport.dtypes import Array

Arrays = Mapping[str, "Array"]
RunWithGiven = Callable[[Arrays, Arrays], tuple[dict[str, "Array"], dict[str, "Array"]]]


class Candidate(Protocol):
    """A model under test, which chooses its own buckets in `run`."""

    def accepts(self, inputs: Arrays) -> bool:
        """Whether the model takes inputs of these shapes: an engine is built for a range of them."""

    def run(self, inputs: Arrays) -> dict[str, Array]: ...

    @property
    def run_with_given(self) -> RunWithGiven | None:
        """Runs the model on inputs and what the reference decided, by value name: the buckets of every hash, and the
        numbers that every rounding gave. Returns the outputs, and the buckets that the model would have chosen and the
        numbers that it would have rounded; None if the model does not show them."""

    @property
    def given(self) -> Collection[str]:
        """What `run_with_given` must be given, by the names of the reference."""
