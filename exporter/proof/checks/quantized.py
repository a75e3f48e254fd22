"""Quantised models: whether the file computes its quantised model, and what quantisation cost.

A rounding that float32 sends to the next step sends others after it, so the answers of two correct runtimes differ by
a share of the loss. As with buckets, the arithmetic is therefore compared with identical roundings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.export.quantized_products import undeclared_products
from effexport.proof.case_label import CaseLabel
from effexport.proof.cases import Case
from effexport.proof.checks.arithmetic import Figures, check_numbers
from effexport.proof.checks.result import RMS_METRIC, Check, Kind, Status, judged, not_run
from effexport.proof.metrics import rms_change
from effexport.proof.own_roundings import foreign_limit, free_limit, with_exact_answers
from effexport.proof.tolerances import rounding_flip_limit
from effexport.quantize.rounding import codes_of, precision_of, rounded_rows, steps_apart

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.checks.candidate import Arrays
    from effexport.quantize.record import Quantization
    from effexport.spec import BuildSpec

LISTED = 3


def check_quantized(
    case: Case, outputs: Mapping[str, Array], given: tuple[Arrays, Arrays] | None, spec: BuildSpec
) -> Iterator[Check]:
    """What applies to any quantised model. Buckets, and the free run of a model that hashes, are checked beside it.

    given: outputs with the reference's roundings and buckets, and the model's own; None if it does not show them.
    """
    if given is not None:
        answers, own = given
        yield from check_numbers(case, answers, spec, Kind.GIVEN_ROUNDINGS)
        yield check_roundings(case, own)
    else:
        reason = "this model does not show them" if case.codes else "they would take too much room in the golden file"
        yield not_run(Kind.GIVEN_ROUNDINGS, f"the roundings cannot be prescribed: {reason}", case.label)
    if not spec.attention.is_hashed:
        limit = free_limit(case, spec) if given is not None or not case.codes else foreign_limit(case, spec)
        yield judged(Kind.QUANTIZED_RUN, case.label, RMS_METRIC, rms_change(case, outputs), limit)
    yield check_loss(case, outputs)


def check_roundings(case: Case, own: Mapping[str, Array]) -> Check:
    """What the model would have rounded by itself, after the roundings of the reference before it."""
    flips, numbers, furthest, places = 0, 0, 0, []
    for name, codes in case.codes.items():
        if own[name].shape != codes.shape:
            detail = f"{name} is {list(own[name].shape)}; expected {list(codes.shape)}"
            return Check(Kind.ROUNDING_AGREEMENT, case.label, "rounded numbers that differ", "failed", detail=detail)
        if not np.isfinite(own[name]).all():
            detail = f"{name} contains NaN or infinity"
            return Check(Kind.ROUNDING_AGREEMENT, case.label, "rounded numbers that differ", "failed", detail=detail)
        precision, scale = precision_of(codes), case.scales[name]
        # a static scale is one number, which a file holds as [1]; that of each token has the axes of its numbers
        dynamic = scale.ndim > 1
        ours = rounded_rows(own[name])[0] if dynamic else codes_of(own[name], precision, scale)
        steps = steps_apart(ours, codes, precision)
        flips += (different := int(np.count_nonzero(steps)))
        numbers += codes.size
        furthest = max(furthest, int(steps.max(initial=0)))
        if different:
            places.append((different, f"{name}: {different} of {codes.size}"))
    detail = "; ".join(text for _, text in sorted(places, reverse=True)[:LISTED])
    limit = rounding_flip_limit(numbers)
    check = judged(Kind.ROUNDING_AGREEMENT, case.label, "rounded numbers that differ", flips, limit, detail)
    if furthest > 1:
        return replace(check, status="failed", detail=f"a number is {furthest} steps away; {detail}")
    return check


def check_loss(case: Case, outputs: Mapping[str, Array]) -> Check:
    """How far the model is from the float model. Not judged here: random inputs say little about a task."""
    exact = with_exact_answers(case)
    figures = Figures()
    for name, expected in exact.outputs.items():
        for row in exact.samples(expected):
            figures.add(exact.kept(name, outputs[name], row), exact.kept(name, expected, row))
    measures = figures.measures()
    detail = f"cosine {measures['cosine']:.6f}"
    if case.buckets:
        tokens = sum(buckets.size for buckets in case.buckets.values())
        flips = sum(int(np.count_nonzero(case.exact[name] != buckets)) for name, buckets in case.buckets.items())
        detail += f"; {100 * flips / tokens:.2g} % of the buckets are others"
    return Check(
        Kind.QUANTIZATION_LOSS,
        case.label,
        RMS_METRIC,
        "passed",
        measures["rms_error"],
        None,
        "reported, and judged only against --max-loss",
        detail,
        measures=measures,
        seq_len=case.label.shape[-1],
    )


def check_products(model: Path, record: Quantization) -> Check:
    """Every product of a file is quantised where the record says so, or declared to stay float."""
    kind, case, metric = Kind.QUANTIZED_PRODUCTS, CaseLabel("the graph"), "products that are neither"
    wrong = undeclared_products(model, record)
    if wrong is None:
        return not_run(kind, "the nodes of this file no longer say which layer they came from", case, metric)
    status: Status = "failed" if wrong else "passed"
    reason = f"{len(record.layers)} layers are quantised, and every other product has a reason to stay float"
    return Check(kind, case, metric, status, len(wrong), 0, reason, "; ".join(wrong[:LISTED]))
