"""Models that hash: arithmetic with identical buckets, agreement of the buckets, and the free run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from effexport.proof.cases import Case
from effexport.proof.checks.arithmetic import check_arithmetic, check_numbers
from effexport.proof.checks.result import RMS_METRIC, Check, Kind, judged
from effexport.proof.metrics import rms_change
from effexport.proof.tolerances import Limit, bucket_flip_limit, case_limit, free_run_limit, near_tie_limit
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.checks.candidate import Arrays


def check_hashed(
    case: Case, free_outputs: Mapping[str, Array], given: tuple[Arrays, Arrays] | None, spec: BuildSpec
) -> Iterator[Check]:
    """A hash-based model: arithmetic with the reference's buckets, agreement of the buckets, and the free run.

    given: outputs with the reference's buckets, and the buckets that the candidate would have chosen itself.
    One flipped bucket moves the borders of chunks and changes a third of all outputs a little, so a free-running
    output is never compared element by element.
    """
    if given is None:
        # the buckets are out of sight: ask for plain agreement, which holds as long as no bucket flips
        yield check_arithmetic(case, free_outputs, case_limit(spec, case.own_error, case.spread), Kind.HIDDEN_BUCKETS)
    else:
        yield from check_given_buckets(case, *given, spec)
    yield check_free_run(case, free_outputs, spec)


def check_given_buckets(
    case: Case, outputs: Mapping[str, Array], own_buckets: Mapping[str, Array], spec: BuildSpec
) -> Iterator[Check]:
    """What a candidate answered with the reference's buckets, and the buckets it would have chosen itself."""
    yield from check_numbers(case, outputs, spec, Kind.GIVEN_BUCKETS)
    yield from check_buckets(case, own_buckets, spec)


def check_free_run(case: Case, outputs: Mapping[str, Array], spec: BuildSpec, limit: Limit | None = None) -> Check:
    """What a candidate answered with its own buckets, against what other rotations would have changed. limit: of a
    quantised model, which rounds by itself, too."""
    assert case.seed_noise is not None
    limit = limit or free_run_limit(spec, case.seed_noise, case.precision_noise)
    return judged(Kind.FREE_RUN, case.label, RMS_METRIC, rms_change(case, outputs), limit)


def check_buckets(case: Case, own: Mapping[str, Array], spec: BuildSpec) -> Iterator[Check]:
    """Buckets that the candidate chose for the reference's inputs: few may differ, and only near-ties."""
    flips, tokens, widest, by_layer = 0, 0, 0.0, []
    for name, expected in case.buckets.items():
        if own[name].shape != expected.shape:
            detail = f"{name} is {list(own[name].shape)}; expected {list(expected.shape)}"
            yield Check(Kind.BUCKET_AGREEMENT, case.label, "buckets that differ", "failed", detail=detail)
            return
        # which of two equal projections is the largest is for each runtime to say
        differs = (own[name] != expected) & (case.margins[name] != 0)
        flips += int(differs.sum())
        by_layer.append(f"{name.removesuffix('.buckets')}: {int(differs.sum())} of {expected.size}")
        tokens += expected.size
        # not the built-in max, which drops NaN
        widest = float(np.maximum(widest, case.margins[name][differs].max(initial=0.0)))
    yield judged(
        Kind.BUCKET_AGREEMENT,
        case.label,
        "buckets that differ",
        flips,
        bucket_flip_limit(spec, tokens),
        "; ".join(by_layer),
    )
    yield judged(Kind.BUCKET_NEAR_TIES, case.label, "widest margin of a differing bucket", widest, near_tie_limit(spec))
