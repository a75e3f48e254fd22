"""The interface of a model under test, and a guard against answers of another shape than the inputs imply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from effexport.dtypes import named_sizes
from effexport.errors import EffexportError
from effexport.models.size_formula import shape_of
from effexport.spec import BuildSpec

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


class WrongShapeError(EffexportError):
    """An answer that cannot be compared; the message says which shape it has and which was expected."""


class ShapeGuard:
    """A candidate whose answers have the shapes that the spec promises; raises WrongShapeError for any other."""

    def __init__(self, candidate: Candidate, spec: BuildSpec) -> None:
        self._candidate = candidate
        self._spec = spec

    def accepts(self, inputs: Arrays) -> bool:
        return self._candidate.accepts(inputs)

    def run(self, inputs: Arrays) -> dict[str, Array]:
        outputs = self._candidate.run(inputs)
        check_shapes(inputs, outputs, self._spec)
        return outputs

    @property
    def given(self) -> Collection[str]:
        return self._candidate.given

    @property
    def run_with_given(self) -> RunWithGiven | None:
        return None if self._candidate.run_with_given is None else self._run_with_given

    def _run_with_given(self, inputs: Arrays, buckets: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        run = self._candidate.run_with_given
        assert run is not None
        outputs, own = run(inputs, buckets)
        check_shapes(inputs, outputs, self._spec)
        return outputs, own


def check_shapes(inputs: Mapping[str, Array], outputs: Mapping[str, Array], spec: BuildSpec) -> None:
    """Raises WrongShapeError unless every output has the sizes of the inputs."""
    sizes = named_sizes(spec.inputs, inputs)
    for tensor in spec.outputs:
        expected = shape_of(tensor.dims, sizes)
        if outputs[tensor.name].shape != expected:
            raise WrongShapeError(f"{tensor.name} is {list(outputs[tensor.name].shape)}; expected {list(expected)}")
