"""One answer compared with the reference's: names, dtypes, shapes, finite values, repeatability, and the numbers.

Models that hash: arithmetic with identical buckets, agreement of the buckets, and the free run. Half precision: what a
file computes in float32, and the answer to a long sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.base.dtypes import Array
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import load_graph, value_types
from effexport.plugins.ops import DOMAIN, OPS
from effexport.proof.cases import Arrays, Case
from effexport.proof.check import (
    HISTOGRAM_EDGES,
    METRIC,
    OUTSIDE,
    RMS_METRIC,
    CaseLabel,
    Check,
    Kind,
    Limit,
    Worst,
    judged,
    not_run,
)
from effexport.proof.inputs import random_inputs
from effexport.proof.tolerances import (
    MASK_CONSTANT,
    bucket_flip_limit,
    case_limit,
    free_run_limit,
    is_ordinary,
    largest,
    largest_error,
    near_tie_limit,
    overall_limit,
    relative_errors,
    rms_change,
)

if TYPE_CHECKING:
    from effexport.proof.candidate import ModelUnderTest

SIGNATURE_METRIC = "names, dtypes, shapes"
FINITE_METRIC = "NaN or Inf elements"


def check_signature(case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Names, dtypes and shapes of the outputs."""
    dtypes = {tensor.name: tensor.dtype for tensor in spec.outputs}
    expected = {name: (dtypes[name], array.shape) for name, array in case.outputs.items()}
    actual = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    detail = "" if actual == expected else f"outputs are {actual}; expected {expected}"
    return Check(Kind.SIGNATURE, case.label, SIGNATURE_METRIC, "failed" if detail else "passed", detail=detail)


def check_finite(
    label: CaseLabel, outputs: Mapping[str, Array], kind: str = Kind.FINITE, case: Case | None = None
) -> Check:
    """Every element of the outputs is a finite number, but where a case has the same infinity, or allows NaN."""
    bad = 0
    for name, array in outputs.items():
        wrong = ~np.isfinite(array.astype(np.float32))
        if case is not None and wrong.any():
            expected = case.outputs[name]
            wrong &= ~((array == expected) | (np.isnan(expected) & case.allows_nan))
        bad += int(np.count_nonzero(wrong))
    reason = "no output may be NaN or infinite that the reference has not"
    return judged(kind, label, FINITE_METRIC, bad, Limit(0, reason))


def check_repeatable(case: Case, first: Mapping[str, Array], second: Mapping[str, Array]) -> Check:
    """The same input twice gives the same bits."""
    different = sum(
        first[name].size if first[name].shape != second[name].shape else differing_bits(first[name], second[name])
        for name in first
    )
    reason = Limit(0, "the same input twice gives the same bits")
    return judged(Kind.REPEATABLE, case.label, "elements that differ", different, reason)


def differing_bits(a: Array, b: Array) -> int:
    """Elements whose bits differ; NaN equals NaN here, since `check_finite` judges it."""
    raw = f"u{a.dtype.itemsize}"
    return int(np.count_nonzero(a.view(raw) != b.view(raw)))


def check_numbers(case: Case, outputs: Mapping[str, Array], spec: BuildSpec, kind: str) -> Iterator[Check]:
    """Every number of the outputs: the largest error, all errors together, and the ranks of indices.

    kind: of the first check.
    """
    limit = case_limit(spec, case.own_error, case.spread)
    check = check_arithmetic(case, outputs, limit, kind)
    yield check
    yield from check_overall(case, check, overall_limit(spec, case.own_error))
    for output in case.ranked:
        yield check_ranks(case, output, outputs[output], limit)


def check_ranks(case: Case, output: str, found: Array, limit: Limit) -> Check:
    """Indices in the order of their scores: where another one stands than in the reference, the reference must give
    both nearly the same score, and none may stand twice."""
    expected = case.outputs[output]
    pairs = [(case.kept(output, found, row), case.kept(output, expected, row)) for row in case.samples(expected)]
    widest = float(np.max([largest_error(*pair) for pair in pairs]))  # not the built-in max, which may drop NaN
    detail = f"{np.count_nonzero(found != expected)} of {expected.size} are others"
    if (np.diff(np.sort(found, axis=-1), axis=-1) == 0).any():
        widest, detail = float("inf"), "an index stands at two ranks"
    return judged(Kind.RANK_NEAR_TIES, case.label, "widest gap of a rank / RMS", widest, limit, detail)


def check_arithmetic(case: Case, outputs: Mapping[str, Array], limit: Limit, kind: str = Kind.ARITHMETIC) -> Check:
    """The largest error of the kept tokens, relative to the scale of the reference, beside other measures."""
    value, worst = -1.0, None
    figures = Figures()
    # of indices, only the scores can be close
    compared = replace(case, outputs={name: array for name, array in case.outputs.items() if name not in case.ranked})
    for output, sample, actual, wanted in compared.pairs(outputs):
        if not wanted.size:
            continue  # x[:, 2:] of two tokens; the shapes have been compared
        error, (row, channel) = figures.add(actual, wanted)
        # NaN wins over every number, and stays
        if value == value and (error > value or error != error):
            value, expected = error, case.outputs[output]
            own = expected[sample] if expected.ndim else expected
            index = (sample, *case.place_of(sample, row, channel, wanted, own))
            worst = Worst(output, index, float(actual[row, channel]), float(wanted[row, channel]))
    detail = ""
    if worst is not None:
        indices = ", ".join(map(str, worst.index))
        detail = f"worst at {worst.output}[{indices}]: {worst.actual:.6g}, reference {worst.expected:.6g}"
    check = judged(kind, case.label, METRIC, max(value, 0.0), limit, detail)
    return replace(check, measures=figures.measures(), histogram=figures.histogram(), worst=worst)


def check_overall(case: Case, check: Check, limit: Limit | None) -> Iterator[Check]:
    """The RMS error found by `check_arithmetic`, against a limit much tighter than that of one element."""
    if limit is not None:
        yield judged(Kind.OVERALL_ERROR, case.label, RMS_METRIC, check.measures["rms_error"], limit)


class Figures:
    """Sums over the samples of a case, from which its measures follow."""

    def __init__(self) -> None:
        self._max_abs = 0.0
        self._squares = np.zeros(3)  # of the error, of the reference, of the answer
        self._product = 0.0
        self._counts = np.zeros(len(HISTOGRAM_EDGES) + 1, dtype=np.int64)

    def add(self, actual: Array, expected: Array) -> tuple[float, tuple[int, int]]:
        """Add [tokens, channels] of one sample. Returns its `relative_error`, found in the same pass."""
        return largest(self._added(actual, expected))

    def _added(self, actual: Array, expected: Array) -> Iterator[Array]:
        for ours, wanted, relative in relative_errors(actual, expected):
            if not is_ordinary(wanted):
                # those have been compared one by one, and would make all other errors look small
                ordinary = np.abs(wanted) < MASK_CONSTANT
                ours, wanted = np.where(ordinary, ours, 0), np.where(ordinary, wanted, 0)
            with np.errstate(invalid="ignore", over="ignore"):  # NaN makes the measures NaN
                error = np.abs(ours - wanted)
                self._max_abs = float(np.maximum(self._max_abs, error.max(initial=0.0)))
                self._squares += [np.sum(np.square(x)) for x in (error, wanted, ours)]
                self._product += float(np.sum(ours * wanted))
            below = [np.count_nonzero(relative < edge) for edge in HISTOGRAM_EDGES]  # NaN is beyond the last
            self._counts += np.diff([0, *below, relative.size])
            yield relative

    def measures(self) -> dict[str, float]:
        """max_abs, in the units of the output; rms_error, relative to the RMS of the reference; cosine similarity.

        The cosine of two answers of zeros is 1.
        """
        errors, reference, answer = self._squares
        tiny = np.finfo(np.float64).tiny
        with np.errstate(invalid="ignore", over="ignore"):  # as above; and the reference may be all zeros
            rms_error = np.sqrt(errors / np.maximum(reference, tiny))
            cosine = self._product / np.maximum(np.sqrt(reference) * np.sqrt(answer), tiny)
        if reference == answer == 0:
            cosine = 1.0
        return {"max_abs": self._max_abs, "rms_error": float(rms_error), "cosine": float(cosine)}

    def histogram(self) -> tuple[int, ...]:
        return tuple(int(count) for count in self._counts)


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
    """Check a candidate's answer with the reference's buckets, and the buckets it would have chosen itself."""
    yield from check_numbers(case, outputs, spec, Kind.GIVEN_BUCKETS)
    yield from check_buckets(case, own_buckets, spec)


def check_free_run(case: Case, outputs: Mapping[str, Array], spec: BuildSpec, limit: Limit | None = None) -> Check:
    """Check a candidate's answer with its own buckets against the change that other rotations make.

    limit: of a quantised model, which rounds by itself, too.
    """
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


# Exponentials, sums over the sequence, iterations and hashes. Not operators that compute in float32 whatever they read:
# EluLinearAttention casts inside its body.
OURS = tuple(name for name, op in OPS.items() if op.around_in_float32 and "float32" in op.element_types)
FLOAT32_OPS = ("Softmax", "Exp", "Log", "ReduceSum", "ArgMax", *OURS)
LISTED = 5


def check_float32_ops(model: Path, spec: BuildSpec) -> list[Check]:
    """Empty for float32 models, and for users' own modules, which choose themselves what stays in float32."""
    if spec.arithmetic == "fp32" or not spec.model.keeps_float32:
        return []
    kind, case, metric = Kind.FLOAT32_OPS, CaseLabel("the graph"), "operators that read half precision"
    proto = load_graph(model)
    types = value_types(proto)
    inside = [node for node in proto.graph.node if node.op_type in FLOAT32_OPS and node.domain in ("", DOMAIN)]
    known = [(node, types[node.input[0]][0]) for node in inside if node.input[0] in types]
    lowered = [node for node, dtype in known if dtype in ("float16", "bfloat16")]
    if inside and not known:
        return [not_run(kind, "the element types of this file cannot be inferred", case, metric)]
    shown = ", ".join(f"{node.op_type} {node.name or node.output[0]}" for node in lowered[:LISTED])
    return [
        Check(
            kind,
            case,
            metric,
            "failed" if lowered else "passed",
            len(lowered),
            0,
            "these overflow or cancel in half precision on a GPU",
            f"they are: {shown}" if lowered else "",
        )
    ]


# Long enough for sums in float16 to overflow; shorter for quadratic variants, because of their memory.
LONG = 8192
LONG_IF_QUADRATIC = 2048
LONG_SEED = 8192


def check_long_sequence(candidate: ModelUnderTest, cases: Sequence[Case], spec: BuildSpec) -> Iterator[Check]:
    """No NaN and no infinity in the answer to one long sequence, as half precision overflows and cancels in long sums;
    nothing if some case is as long already."""
    kind = Kind.LONG_SEQUENCE
    length = min(LONG_IF_QUADRATIC if spec.attention.is_quadratic else LONG, spec.model.max_seq_len or LONG)
    if spec.model.fixed_seq_len is not None or length <= max(case.keep.shape[-1] for case in cases):
        return
    label = CaseLabel("long", (1, length))
    inputs = random_inputs(spec, np.random.default_rng(LONG_SEED), 1, length, None)
    if not candidate.accepts(inputs):
        yield not_run(kind, f"a sequence of {length} tokens {OUTSIDE}", label, FINITE_METRIC)
        return
    yield check_finite(label, candidate.run(inputs), kind)
