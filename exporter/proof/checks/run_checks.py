"""Every check that applies to a model, case by case: whether it computes what the reference computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from effexport.proof.case_label import ALL_CASES, CaseLabel
from effexport.proof.cases import Case
from effexport.proof.checks.arithmetic import (
    FINITE_METRIC,
    SIGNATURE_METRIC,
    check_finite,
    check_numbers,
    check_repeatable,
    check_signature,
)
from effexport.proof.checks.candidate import Candidate, ShapeGuard, WrongShapeError
from effexport.proof.checks.hashed import check_buckets, check_free_run, check_hashed
from effexport.proof.checks.invariance import check_alone, check_padding_content, check_prefix
from effexport.proof.checks.quantized import check_quantized
from effexport.proof.checks.result import OUTSIDE, Check, Kind, not_run
from effexport.proof.inputs.random import random_inputs
from effexport.proof.own_roundings import free_limit
from effexport.spec import BuildSpec, Precision

if TYPE_CHECKING:
    from effexport.dtypes import Array

# Long enough for sums in float16 to overflow; shorter for quadratic variants, because of their memory.
LONG = 8192
LONG_IF_QUADRATIC = 2048
SEED = 8192


def run_checks(
    candidate: Candidate, cases: Sequence[Case], spec: BuildSpec, precision_hint: str = ""
) -> Iterator[Check]:
    """Every check that applies, case by case. precision_hint: see RunOptions; its limits then apply."""
    computed = replace(spec, precision=cast(Precision, precision_hint)) if precision_hint else spec
    guarded = ShapeGuard(candidate, spec)
    for index, case in enumerate(cases):
        if not candidate.accepts(case.inputs):
            yield not_run(Kind.SHAPES, f"this case {OUTSIDE}", case.label)
            continue
        outputs = candidate.run(case.inputs)
        yield check_signature(case, outputs, spec)
        if set(outputs) == set(case.outputs) and all(outputs[n].shape == case.outputs[n].shape for n in outputs):
            yield from up_to_wrong_shape(checks_of_answer(guarded, case, outputs, computed, index == 0), case.label)
    if spec.arithmetic != "fp32":
        yield from up_to_wrong_shape(check_long_sequence(guarded, cases, spec), ALL_CASES)


def checks_of_answer(
    candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec, is_first: bool
) -> Iterator[Check]:
    """Every check of an answer that has the right names and shapes."""
    yield check_finite(case.label, outputs, case=case)
    yield check_repeatable(case, outputs, candidate.run(case.inputs))
    alike = outputs
    run = candidate.run_with_given
    # a case whose roundings take too much room has none
    is_known = set(candidate.given) <= set(case.given) and set(case.codes) <= set(candidate.given)
    given = run(case.inputs, case.given) if run and is_known else None
    if spec.is_quantized:
        yield from check_quantized(case, outputs, given, spec)
        if spec.attention.is_hashed:
            yield from check_buckets(case, given[1], spec) if given else ()
            yield check_free_run(case, outputs, spec, free_limit(case, spec))
    elif spec.attention.is_hashed:
        yield from check_hashed(case, outputs, given, spec)
        if given is not None:
            # the same buckets for both, or a near-tie could tell a sample from itself in a batch
            alike, _ = given
    else:
        yield from check_numbers(case, outputs, spec, Kind.ARITHMETIC)
    if len(case.keep) > 1:
        yield from check_alone(candidate, case, alike, spec)
    if not case.keep.all():
        yield check_padding_content(candidate, case, outputs, spec)
    if spec.model.is_causal and is_first:
        yield check_prefix(candidate, case, outputs, spec)


def up_to_wrong_shape(checks: Iterator[Check], label: CaseLabel) -> Iterator[Check]:
    """The checks, up to one whose run returned another shape than expected: a failed check of the signature."""
    try:
        yield from checks
    except WrongShapeError as error:
        yield Check(Kind.SIGNATURE, label, SIGNATURE_METRIC, "failed", detail=str(error))


def check_long_sequence(candidate: Candidate, cases: Sequence[Case], spec: BuildSpec) -> Iterator[Check]:
    """No NaN and no infinity in the answer to one long sequence, as half precision overflows and cancels in long sums;
    nothing if some case is as long already."""
    kind = Kind.LONG_SEQUENCE
    length = min(LONG_IF_QUADRATIC if spec.attention.is_quadratic else LONG, spec.model.max_seq_len or LONG)
    if spec.model.fixed_seq_len is not None or length <= max(case.keep.shape[-1] for case in cases):
        return
    label = CaseLabel("long", (1, length))
    inputs = random_inputs(spec, np.random.default_rng(SEED), 1, length, None)
    if not candidate.accepts(inputs):
        yield not_run(kind, f"a sequence of {length} tokens {OUTSIDE}", label, FINITE_METRIC)
        return
    yield check_finite(label, candidate.run(inputs), kind)
