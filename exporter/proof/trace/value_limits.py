"""Is an intermediate value as near to PyTorch's as rounding allows?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from effexport.proof.metrics import magnitude, value_error
from effexport.proof.tolerances import bucket_flip_limit, case_limit
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import onnx

    from effexport.dtypes import Array
    from effexport.proof.cases import Case

# In low precision both sides round: PyTorch as far as its own run shows, the candidate up to three times as far. Its
# worst element was up to 1.9 times as far as PyTorch's in all cases of 15 float16 models.
ROUNDING_FACTOR = 4.0
# Half a unit in the last place of float32, relative: how far any number is from the one that it was rounded to.
FLOAT32_ROUNDING = 2.0**-24
# What they make has the elements of their operands, and so the same errors.
MOVES = ("Concat", "Expand", "Gather", "Identity", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
# No rounding makes an error as large as the values themselves acceptable.
LARGEST_LIMIT = 1.0


class ValueLimits:
    """Takes values beside PyTorch's and keeps their errors and limits.

    The limit of a float value is that of the outputs. It is raised where PyTorch's own rounding moves the value
    further: an exponential makes 3 % of the 0.03 by which float16 rounds a logit of 60, and the inverse of a matrix
    that is nearly singular moves by more than float32's limit. And it is raised where operands hold no more: the
    difference of two exponents of 62 is off by what float32 left of them, and its exponential by as much again.
    """

    def __init__(
        self, spec: BuildSpec, case: Case, may_flip: Collection[str], nodes: Mapping[str, onnx.NodeProto] | None = None
    ) -> None:
        """nodes: that make the values, by name of the value."""
        self._spec, self._may_flip, self._nodes = spec, may_flip, nodes or {}
        self._limit = case_limit(spec, case.own_error, case.spread).value
        self.results: dict[str, tuple[float, float]] = {}
        self._largest: dict[str, float] = {}
        self._allowed: dict[str, float] = {}

    def __call__(self, name: str, actual: Array, expected: Array, exact: Array | None) -> None:
        """exact: what PyTorch computes in a wider type, None where that is not known."""
        if expected.dtype.kind in "biu":
            flips = bucket_flip_limit(self._spec, expected.size).value if name in self._may_flip else 0.0
            limit = flips / max(1, expected.size)
        else:
            rounding = 0.0 if exact is None else value_error(expected, exact)
            largest, scale = magnitude(expected)
            inherited = self._inherited(name, largest) / scale if scale else 0.0
            limit = max(self._limit, min(max(ROUNDING_FACTOR * rounding, inherited), LARGEST_LIMIT))
            self._largest[name], self._allowed[name] = largest, limit * scale
        self.results[name] = (value_error(actual, expected), limit)

    def _inherited(self, name: str, largest: float) -> float:
        """How far a sum, an exponential or a copy may be off, absolutely, since its operands were rounded."""
        node = self._nodes.get(name)
        operands = [] if node is None else [operand for operand in node.input if operand in self._largest]
        if node is not None and node.op_type in ("Add", "Sub"):
            return ROUNDING_FACTOR * FLOAT32_ROUNDING * sum(self._largest[operand] for operand in operands)
        if node is not None and node.op_type == "Exp" and operands:
            return self._allowed[operands[0]] * largest
        if node is not None and node.op_type in MOVES:
            return max((self._allowed[operand] for operand in operands), default=0.0)
        return 0.0
