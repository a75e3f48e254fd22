"""How far two runs of a quantised model may be apart that round by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from effexport.proof.metrics import rms_change
from effexport.proof.tolerances import Limit, free_run_limit, rounding_limit

if TYPE_CHECKING:
    from effexport.proof.cases import Case
    from effexport.spec import BuildSpec


def free_limit(case: Case, spec: BuildSpec) -> Limit:
    """The limit of one case, RMS-relative. A model that hashes also chooses buckets of its own."""
    limit = rounding_limit(spec, case.precision_noise, rms_change(with_exact_answers(case), case.outputs))
    if case.seed_noise is None:
        return limit
    return max(limit, free_run_limit(spec, case.seed_noise, case.precision_noise), key=lambda one: one.value)


def foreign_limit(case: Case, spec: BuildSpec) -> Limit:
    """The limit of a file that does not show its roundings: another tool may have chosen its scales, and two
    independent roundings of one model are √2 times as far apart as each is from the float model."""
    limit = free_limit(case, spec)
    return Limit(2**0.5 * limit.value, f"√2 × {limit.reason}: the roundings are not known to be PyTorch's")


def with_exact_answers(case: Case) -> Case:
    """The case with the answers of the float model. Without ranked indices, whose scores belong to the quantised."""
    outputs = {name: case.exact[name] for name in case.outputs if name in case.exact and name not in case.ranked}
    return replace(case, outputs=outputs, ranked={})
