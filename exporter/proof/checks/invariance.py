"""What must not change a result: the rest of the batch, padding and its content and, if causal, later tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from effexport.models.head_spec import MASKS
from effexport.models.spec import LSHSpec
from effexport.proof.cases import Case
from effexport.proof.checks.candidate import Candidate
from effexport.proof.checks.independence import check_independent
from effexport.proof.checks.result import OUTSIDE, Check, Kind, judged, not_run
from effexport.proof.checks.worst import Worst, limit_without, metric_of
from effexport.proof.inputs.padded import padding_of_other_content
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array


def check_alone(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Iterator[Check]:
    """Each sample alone, without its padding, equals its rows in the batch: the batch invariance of all samples, and
    the padding length of those that the batch pads.

    outputs: of the batch; with the buckets of the case, if the candidate can be given buckets.
    """
    metric = metric_of("alone − in batch", spec)
    is_padded = not case.keep.all() and spec.attention.fixed_seq_len is None
    found = {kind: Worst(spec) for kind in (Kind.BATCH_INVARIANCE, *[Kind.PADDING_LENGTH] * is_padded)}
    if spec.model.why_not_invariant:
        if not spec.why_samples_mix:  # about other lengths, nothing was declared
            del found[Kind.BATCH_INVARIANCE]
            yield check_independent(candidate, case, outputs, spec)
        yield from (not_run(kind, spec.model.why_not_invariant, case.label, metric) for kind in found)
        return
    is_long = {tensor.name: tensor.dims[1:] != (MASKS,) for tensor in spec.inputs}
    # a quantised model rounds by itself here: given roundings would hide a scale that depends on other samples
    run_with_given = None if spec.is_quantized else candidate.run_with_given
    for row, keep in enumerate(case.keep):
        length = int(np.flatnonzero(keep)[-1]) + 1 if spec.attention.fixed_seq_len is None else keep.size
        alone = {key: value[row : row + 1, : length if is_long[key] else None] for key, value in case.inputs.items()}
        if not candidate.accepts(alone):
            reason = f"sample {row} on its own {OUTSIDE}"
            yield from (not_run(kind, reason, case.label, metric) for kind in found)
            return
        if run_with_given is not None:
            given = {key: sample_buckets(value, row, length, spec) for key, value in case.buckets.items()}
            result, _ = run_with_given(alone, given)
        else:
            result = candidate.run(alone)
        for output in case.outputs:
            own, joined = result[output][0], outputs[output][row]
            if output in case.pooled:
                own, joined = (case.all_of(output, array, row) for array in (own, joined))
            else:
                joined = joined[:length]
            for kind, worst in found.items():
                if kind == Kind.BATCH_INVARIANCE or length < keep.size:
                    worst.add(own, joined, f"worst in sample {row}")
    limit = limit_without(case, spec, "neither other samples nor padding may add to it")
    for kind, worst in found.items():
        yield judged(kind, case.label, metric, worst.error, limit, worst.detail)


def check_padding_content(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Kept tokens get the same answer whatever the padding contains."""
    kind, metric = Kind.PADDING_CONTENT, metric_of("change", spec)
    if spec.model.why_padding_counts:
        return not_run(kind, spec.model.why_padding_counts, case.label, metric)
    changed, worst = candidate.run(padding_of_other_content(case, spec)), Worst(spec)
    for output in case.outputs:
        for row in range(len(case.keep)):
            actual, expected = case.kept(output, changed[output], row), case.kept(output, outputs[output], row)
            worst.add(actual, expected, f"worst in sample {row} of {output}")
    limit = limit_without(case, spec, "padding may not add to it")
    return judged(kind, case.label, metric, worst.error, limit, worst.detail)


def check_prefix(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """A causal model answers the first tokens as if nothing came after them."""
    kind, metric = Kind.CAUSAL_PREFIX, metric_of("prefix − whole", spec)
    if spec.attention.is_hashed:
        reason = "later tokens occupy slots in the sort and shift chunk boundaries"
        return not_run(kind, reason, case.label, metric)
    if case.pooled:
        return not_run(kind, "a vector stands for all tokens, those that come later too", case.label, metric)
    length = max(1, case.keep.shape[1] // 2 + 1)
    prefix = {key: value[:, :length] for key, value in case.inputs.items()}
    if not candidate.accepts(prefix):
        return not_run(kind, f"a prefix of {length} tokens {OUTSIDE}", case.label, metric)
    answer, worst = candidate.run(prefix), Worst(spec)
    for output in case.outputs:
        for row in range(len(case.keep)):
            worst.add(answer[output][row], outputs[output][row, :length], "")
    limit = limit_without(case, spec, "later tokens may not add to it")
    return judged(kind, case.label, metric, worst.error, limit, f"prefix of {length} tokens")


def sample_buckets(buckets: Array, row: int, length: int, spec: BuildSpec) -> Array:
    """The buckets of one sample, cropped to its length and padded to whole chunks."""
    attention = spec.attention
    assert isinstance(attention, LSHSpec)
    per_sample = attention.heads * attention.num_hashes
    own = buckets[row * per_sample : (row + 1) * per_sample, :length]
    pad = -length % attention.chunk_length
    return np.pad(own, ((0, 0), (0, pad)), constant_values=attention.total_buckets)
