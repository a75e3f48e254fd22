"""The largest of several differences between answers that should be the same, and its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.proof.cases import Case
from effexport.proof.metrics import overall_error, relative_error
from effexport.proof.own_roundings import free_limit
from effexport.proof.tolerances import Limit, case_limit
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array


class Worst:
    """The largest relative error of several comparisons, and which one it was; NaN counts as the largest.

    Of a quantised model it is the RMS error of a sample: one number that is rounded to the next step is no fault.
    """

    def __init__(self, spec: BuildSpec) -> None:
        self.error, self.detail = 0.0, ""
        self._overall = spec.is_quantized

    def add(self, actual: Array, expected: Array, detail: str) -> None:
        error = overall_error(actual, expected) if self._overall else relative_error(actual, expected)[0]
        if error > self.error or error != error:
            self.error, self.detail = error, detail


def metric_of(difference: str, spec: BuildSpec) -> str:
    """How `Worst` measures a difference, in words."""
    return f"RMS of ({difference}) / RMS" if spec.is_quantized else f"max |{difference}| / RMS"


def arithmetic_of_case(case: Case, spec: BuildSpec) -> Limit:
    return case_limit(spec, case.own_error, case.spread)


def limit_without(case: Case, spec: BuildSpec, condition: str) -> Limit:
    """The limit of the arithmetic, with the condition that nothing else may use it up."""
    own = free_limit if spec.is_quantized else arithmetic_of_case
    limit = own(case, spec)
    return Limit(limit.value, f"{limit.reason}; {condition}")
