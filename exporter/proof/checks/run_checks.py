"""Every check that applies to a model, case by case: whether it computes what the reference computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from effexport.proof.cases import Case
from effexport.proof.checks.arithmetic import (
    check_arithmetic,
    check_finite,
    check_overall,
    check_repeatable,
    check_signature,
)
from effexport.proof.checks.candidate import Candidate
from effexport.proof.checks.hashed import check_hashed
from effexport.proof.checks.invariance import check_batch_invariance, check_padding_content, check_prefix
from effexport.proof.checks.long_sequences import check_long_sequence
from effexport.proof.checks.result import OUTSIDE, Check, Kind, not_run
from effexport.proof.tolerances import case_limit, overall_limit
from effexport.spec import BuildSpec, Precision


def run_checks(
    candidate: Candidate, cases: Sequence[Case], spec: BuildSpec, precision_hint: str = ""
) -> Iterator[Check]:
    """Every check that applies, case by case. precision_hint: see ModelOptions; its limits then apply."""
    computed = replace(spec, precision=cast(Precision, precision_hint)) if precision_hint else spec
    for index, case in enumerate(cases):
        if not candidate.accepts(case.inputs):
            yield not_run(Kind.SHAPES, f"this case {OUTSIDE}", case.label)
            continue
        outputs = candidate.run(case.inputs)
        yield check_signature(case, outputs, spec)
        if set(outputs) != set(case.outputs) or any(outputs[n].shape != case.outputs[n].shape for n in outputs):
            continue  # nothing else can be compared
        yield check_finite(case.label, outputs)
        yield check_repeatable(case, outputs, candidate.run(case.inputs))
        if spec.attention.is_hashed:
            yield from check_hashed(candidate, case, outputs, computed)
        else:
            check = check_arithmetic(case, outputs, case_limit(computed, case.own_error))
            yield check
            yield from check_overall(case, check, overall_limit(computed, case.own_error))
        if len(case.keep) > 1:
            yield check_batch_invariance(candidate, case, outputs, computed)
        if not case.keep.all():
            yield check_padding_content(candidate, case, outputs, computed)
        if spec.model.is_causal and index == 0:
            yield check_prefix(candidate, case, outputs, computed)
    if spec.precision != "fp32":
        yield from check_long_sequence(candidate, cases, spec)
