"""Guards checks against a runtime whose answer has another shape than the inputs imply."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from effexport.dtypes import named_sizes
from effexport.errors import EffexportError
from effexport.models.size_formula import shape_of
from effexport.proof.checks.candidate import Candidate
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.checks.candidate import Arrays, RunWithGiven


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
