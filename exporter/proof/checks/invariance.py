"""What must not matter: batch mates, padding, what padding holds, and, for a causal model, what comes later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from effexport.proof.cases import Case
from effexport.proof.checks.candidate import Candidate
from effexport.proof.checks.hashed import sample_buckets
from effexport.proof.checks.result import OUTSIDE, Check, Kind, judged, not_run
from effexport.proof.inputs.padded import padding_of_other_content
from effexport.proof.metrics import relative_error
from effexport.proof.tolerances import Limit, case_limit
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array


def check_batch_invariance(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Each sample alone, without its padding, equals its rows in the batch."""
    kind, metric = Kind.BATCH_INVARIANCE, "max |alone − in batch| / RMS"
    reason = spec.model.why_not_invariant
    if reason:
        return not_run(kind, reason, case.label, metric)
    limit = case_limit(spec, case.own_error)
    reference_free = Limit(limit.value, f"{limit.reason}; neither batch mates nor padding may add to it")
    worst, detail = 0.0, ""
    run_with_buckets = candidate.run_with_buckets
    if run_with_buckets is not None:
        # the same buckets for both, or a near-tie could tell them apart
        outputs, _ = run_with_buckets(case.inputs, case.buckets)
    for row, keep in enumerate(case.keep):
        length = int(np.flatnonzero(keep)[-1]) + 1
        if spec.attention.fixed_seq_len is not None:
            length = keep.size
        alone = {key: value[row : row + 1, :length] for key, value in case.inputs.items()}
        if not candidate.accepts(alone):
            return not_run(kind, f"sample {row} on its own {OUTSIDE}", case.label, metric)
        if run_with_buckets is not None:
            given = {key: sample_buckets(value, row, length, spec) for key, value in case.buckets.items()}
            result, _ = run_with_buckets(alone, given)
        else:
            result = candidate.run(alone)
        for output in case.outputs:
            error, _ = relative_error(result[output][0], outputs[output][row, :length])
            if error > worst or error != error:
                worst, detail = error, f"worst in sample {row}"
    return judged(kind, case.label, metric, worst, reference_free, detail)


def check_padding_content(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Kept tokens get the same answer whatever the padding holds."""
    kind, metric = Kind.PADDING_CONTENT, "max |change| / RMS"
    reason = spec.model.why_padding_counts
    if reason:
        return not_run(kind, reason, case.label, metric)
    changed = candidate.run(padding_of_other_content(case, spec))
    worst, detail = 0.0, ""
    for output in case.outputs:
        for row in range(len(case.keep)):
            error, _ = relative_error(case.kept(changed[output], row), case.kept(outputs[output], row))
            if error > worst or error != error:
                worst, detail = error, f"worst in sample {row} of {output}"
    limit = case_limit(spec, case.own_error)
    return judged(
        kind, case.label, metric, worst, Limit(limit.value, f"{limit.reason}; padding may not add to it"), detail
    )


def check_prefix(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """A causal model answers the first tokens as if nothing came after them."""
    kind, metric = Kind.CAUSAL_PREFIX, "max |prefix − whole| / RMS"
    if spec.attention.is_hashed:
        reason = "later tokens take places in the sort, and so move the borders of chunks"
        return not_run(kind, reason, case.label, metric)
    length = max(1, case.keep.shape[1] // 2 + 1)
    prefix = {key: value[:, :length] for key, value in case.inputs.items()}
    if not candidate.accepts(prefix):
        return not_run(kind, f"a prefix of {length} tokens {OUTSIDE}", case.label, metric)
    answer = candidate.run(prefix)
    worst = 0.0
    for output in case.outputs:
        for row in range(len(case.keep)):
            error, _ = relative_error(answer[output][row], outputs[output][row, :length])
            worst = float(np.maximum(worst, error))
    limit = case_limit(spec, case.own_error)
    detail = f"prefix of {length} tokens"
    return judged(
        kind, case.label, metric, worst, Limit(limit.value, f"{limit.reason}; later tokens may not add to it"), detail
    )
