"""Does a model compute what the reference computed? Independent checks with one result type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from effexport.models.checkpoint_spec import CheckpointSpec
from effexport.models.spec import LookAroundSpec, LSHSpec, NystromSpec
from effexport.reference import Case, rms, rms_change
from effexport.spec import BuildSpec
from effexport.tolerances import Limit, arithmetic_limit, bucket_flip_limit, free_run_limit, near_tie_limit

if TYPE_CHECKING:
    from effexport.runners import Array

Status = Literal["passed", "failed", "not run"]
METRIC = "max |error| / RMS"
# Relative errors from 1e-9 to 1, one decade each.
HISTOGRAM_EDGES = tuple(10.0**exponent for exponent in range(-9, 1))
OUTSIDE = "is outside the shapes that the model was built for"

Arrays = Mapping[str, "Array"]
RunWithBuckets = Callable[[Arrays, Arrays], tuple[dict[str, "Array"], dict[str, "Array"]]]


@dataclass(frozen=True)
class Worst:
    """The element of an output that is furthest from what was expected, relative to the scale of its sample."""

    output: str
    index: tuple[int, ...]
    actual: float
    expected: float


@dataclass(frozen=True)
class Check:
    """One result: what was compared (`name`, `case`), by which metric, and whether it passed.

    value and limit are numbers where the metric has them; `reason` explains the limit, or why it was not run; `detail`
    adds what helps to find a failure.
    measures: other figures of the same comparison, by name: max_abs, rms_error (relative), cosine.
    seq_len: tokens of the case. histogram: how many elements have a relative error in each of HISTOGRAM_EDGES' decades,
    below the first edge and beyond the last included.
    """

    name: str
    case: str
    metric: str
    status: Status
    value: float | None = None
    limit: float | None = None
    reason: str = ""
    detail: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    worst: Worst | None = None
    seq_len: int | None = None
    histogram: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Candidate(Protocol):
    """A model under test. `run` is free; `run_with_buckets` takes the buckets of every hash by value name and also
    returns the buckets it would have chosen; it is None when the model does not show them. `accepts` tells whether the
    model takes inputs of these shapes: an engine is built for a range of them."""

    def accepts(self, inputs: Mapping[str, Array]) -> bool: ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...

    @property
    def run_with_buckets(
        self,
    ) -> RunWithBuckets | None: ...


def run_checks(candidate: Candidate, cases: Sequence[Case], spec: BuildSpec) -> Iterator[Check]:
    """Every check that applies, case by case."""
    for case in cases:
        if not candidate.accepts(case.inputs):
            yield Check("shapes", case.title, "not measured", "not run", reason=f"this case {OUTSIDE}")
            continue
        outputs = candidate.run(case.inputs)
        yield check_signature(case, outputs, spec)
        if set(outputs) != set(case.outputs) or any(outputs[n].shape != case.outputs[n].shape for n in outputs):
            continue  # nothing else can be compared
        yield check_finite(case, outputs)
        yield check_repeatable(case, outputs, candidate.run(case.inputs))
        if isinstance(spec.attention, LSHSpec):
            yield from check_hashed(candidate, case, outputs, spec)
        else:
            yield check_arithmetic(case, outputs, arithmetic_limit(spec))
        if len(case.keep) > 1:
            yield check_batch_invariance(candidate, case, outputs, spec)


def passed(checks: Sequence[Check]) -> bool:
    """At least one check ran, and none failed."""
    return any(c.status == "passed" for c in checks) and all(c.status != "failed" for c in checks)


def judged(name: str, case: Case, metric: str, value: float, limit: Limit, detail: str = "") -> Check:
    """A check against a limit. Written so that NaN fails."""
    status: Status = "passed" if value <= limit.value else "failed"
    return Check(name, case.title, metric, status, value, limit.value, limit.reason, detail)


def check_signature(case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Names, dtypes and shapes of the outputs."""
    expected = {name: (spec.dtype, case.outputs[name].shape) for name in case.outputs}
    actual = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    detail = "" if actual == expected else f"outputs are {actual}; expected {expected}"
    return Check("signature", case.title, "names, dtypes, shapes", "failed" if detail else "passed", detail=detail)


def check_finite(case: Case, outputs: Mapping[str, Array]) -> Check:
    bad = sum(int(np.count_nonzero(~np.isfinite(array.astype(np.float32)))) for array in outputs.values())
    return judged("finite", case, "NaN or Inf elements", bad, Limit(0, "no output may be NaN or infinite"))


def check_repeatable(case: Case, first: Mapping[str, Array], second: Mapping[str, Array]) -> Check:
    different = sum(
        first[name].size if first[name].shape != second[name].shape else differing_bits(first[name], second[name])
        for name in first
    )
    reason = Limit(0, "the same input twice gives the same bits")
    return judged("repeatable", case, "elements that differ", different, reason)


def differing_bits(a: Array, b: Array) -> int:
    """Elements whose bits differ; NaN equals NaN here, since `check_finite` judges it."""
    raw = f"u{a.dtype.itemsize}"
    return int(np.count_nonzero(a.view(raw) != b.view(raw)))


def check_arithmetic(case: Case, outputs: Mapping[str, Array], limit: Limit, name: str = "arithmetic") -> Check:
    """Largest error of the kept tokens, relative to the scale of the reference."""
    worst, detail = -1.0, ""
    for output, expected in case.outputs.items():
        for sample in range(len(expected)):
            actual, wanted = case.kept(outputs[output], sample), case.kept(expected, sample)
            error, (row, channel) = relative_error(actual, wanted)
            if error > worst or error != error:
                worst = error
                token = int(np.flatnonzero(case.keep[sample])[row]) if len(wanted) > 1 else row
                detail = (
                    f"worst at {output}[{sample}, {token}, {channel}]: {float(actual[row, channel]):.6g}, "
                    f"reference {float(wanted[row, channel]):.6g}"
                )
            if error != error:
                break
    return judged(name, case, METRIC, worst, limit, detail)


def relative_error(actual: Array, expected: Array) -> tuple[float, tuple[int, int]]:
    """max |actual − expected| / scale over [tokens, channels], and where; NaN wins over every number.

    The scale of a token is the RMS of its sample, or its own where that is larger: the first tokens of a causal model,
    which average over few keys, are ten times larger than the rest, and so is their rounding.
    """
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    own = np.sqrt(np.mean(np.square(expected), axis=-1, keepdims=True))
    scale = np.maximum(np.maximum(own, rms(expected)), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):  # inf − inf is NaN, which is what it should be
        error = np.abs(actual - expected) / scale
    token, channel = np.unravel_index(int(np.argmax(error)), error.shape)
    return float(error[token, channel]), (int(token), int(channel))


def check_hashed(
    candidate: Candidate, case: Case, free_outputs: Mapping[str, Array], spec: BuildSpec
) -> Iterator[Check]:
    """A hash-based model: arithmetic with the reference's buckets, agreement of the buckets, and the free run.

    One flipped bucket moves the borders of chunks and changes a third of all outputs a little, so a free-running
    output is never compared element by element.
    """
    if candidate.run_with_buckets is None:
        # the buckets are out of sight: ask for plain agreement, which holds as long as no bucket flips
        yield check_arithmetic(case, free_outputs, arithmetic_limit(spec), "arithmetic (buckets not visible)")
    else:
        outputs, own_buckets = candidate.run_with_buckets(case.inputs, case.buckets)
        yield check_arithmetic(case, outputs, arithmetic_limit(spec), "arithmetic with identical buckets")
        yield from check_buckets(case, own_buckets, spec)
    assert case.seed_noise is not None
    limit = free_run_limit(spec, case.seed_noise, case.precision_noise)
    yield judged("free run", case, "RMS error / RMS", rms_change(case, free_outputs), limit)


def check_buckets(case: Case, own: Mapping[str, Array], spec: BuildSpec) -> Iterator[Check]:
    """Buckets that the candidate chose for the reference's inputs: few may differ, and only near-ties."""
    flips, tokens, widest = 0, 0, 0.0
    for name, expected in case.buckets.items():
        if own[name].shape != expected.shape:
            detail = f"{name} is {list(own[name].shape)}; expected {list(expected.shape)}"
            yield Check("bucket agreement", case.title, "buckets that differ", "failed", detail=detail)
            return
        differs = own[name] != expected
        flips += int(differs.sum())
        tokens += expected.size
        # not the built-in max, which drops NaN
        widest = float(np.maximum(widest, case.margins[name][differs].max(initial=0.0)))
    yield judged("bucket agreement", case, "buckets that differ", flips, bucket_flip_limit(spec, tokens))
    yield judged("bucket near-ties", case, "widest margin of a differing bucket", widest, near_tie_limit(spec))


def check_batch_invariance(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Each sample alone, without its padding, equals its rows in the batch."""
    name, metric = "batch invariance", "max |alone − in batch| / RMS"
    reason = why_not_invariant(spec)
    if reason:
        return Check(name, case.title, metric, "not run", reason=reason)
    limit = arithmetic_limit(spec)
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
            return Check(name, case.title, metric, "not run", reason=f"sample {row} on its own {OUTSIDE}")
        if run_with_buckets is not None:
            given = {key: sample_buckets(value, row, length, spec) for key, value in case.buckets.items()}
            result, _ = run_with_buckets(alone, given)
        else:
            result = candidate.run(alone)
        for output in case.outputs:
            error, _ = relative_error(result[output][0], outputs[output][row, :length])
            if error > worst or error != error:
                worst, detail = error, f"worst in sample {row}"
    return judged(name, case, metric, worst, reference_free, detail)


def why_not_invariant(spec: BuildSpec) -> str:
    """Which published behaviour, if any, makes padding or batch mates part of a sample's input."""
    attention = spec.attention
    if isinstance(spec.model, CheckpointSpec):
        return spec.model.why_not_invariant
    if isinstance(attention, NystromSpec):
        if not attention.mask_landmarks:
            return "mask_landmarks=False: padding is part of the input"
        if attention.pinv_init == "global" and not attention.is_plain_softmax:
            return "pinv_init=global: batch mates are part of the input"
    if isinstance(attention, LookAroundSpec) and attention.circular:
        return "circular=True: the first chunk sees the last one, so the amount of padding is part of the input"
    return ""


def sample_buckets(buckets: Array, row: int, length: int, spec: BuildSpec) -> Array:
    """The buckets of one sample, cropped to its length and padded to whole chunks."""
    attention = spec.attention
    assert isinstance(attention, LSHSpec)
    per_sample = attention.heads * attention.num_hashes
    own = buckets[row * per_sample : (row + 1) * per_sample, :length]
    pad = -length % attention.chunk_length
    return np.pad(own, ((0, 0), (0, pad)), constant_values=attention.total_buckets)


def summary(checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """Per kind of check: how many passed, failed or did not run, and the worst value beside its limit."""
    result: dict[str, dict[str, Any]] = {}
    for check in checks:
        entry = result.setdefault(
            check.name,
            {"passed": 0, "failed": 0, "not run": 0, "worst": None, "limit": None, "metric": check.metric},
        )
        entry[check.status] += 1
        if check.value is None or check.limit is None:
            continue
        # the worst is the one closest to its own limit, or beyond it; NaN is beyond every limit
        if entry["worst"] is None or not _share(check.value, check.limit) <= _share(entry["worst"], entry["limit"]):
            entry["worst"], entry["limit"] = check.value, check.limit
    return result


def _share(value: float, limit: float) -> float:
    if value != value:
        return float("inf")
    return value / limit if limit > 0 else value
