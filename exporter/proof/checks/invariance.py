"""Influences that must not change a result: the rest of the batch, padding and its content and, if causal, later
tokens.

A decoder is held to the answers to whole sequences: token by token, and after a prompt, or a source, that is read at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from effexport.base.dtypes import Array, numpy_dtype
from effexport.base.spec import MASK_NAME, BuildSpec
from effexport.proof.cases import Case
from effexport.proof.check import METRIC, OUTSIDE, RMS_METRIC, Check, Kind, Limit, judged, not_run
from effexport.proof.checks.arithmetic import check_arithmetic
from effexport.proof.inputs import has_axes_of_tokens, padding_of_other_content
from effexport.proof.tolerances import (
    arithmetic_limit,
    case_limit,
    free_limit,
    largest_error,
    overall_error,
    rms_change,
)
from effexport.runners.decode import DecodeRunner, EncoderDecoderRunner, Graph

if TYPE_CHECKING:
    from effexport.proof.candidate import ModelUnderTest


# A larger batch than that of any case, and as large as a server makes by default.
MIXED_ROWS = 8
# The outputs of a batch that is made of these samples of a case.
RunRows = Callable[[Sequence[int]], Mapping[str, "Array"]]


class LargestError:
    """The largest relative error of several comparisons, and which one it was; NaN counts as the largest.

    Of a quantised model it is the RMS error of a sample: one number that is rounded to the next step is no fault.
    """

    def __init__(self, spec: BuildSpec) -> None:
        self.error, self.detail = 0.0, ""
        self._overall = spec.is_quantized

    def add(self, actual: Array, expected: Array, detail: str) -> None:
        error = (overall_error if self._overall else largest_error)(actual, expected)
        if error > self.error or error != error:
            self.error, self.detail = error, detail


def metric_of(difference: str, spec: BuildSpec) -> str:
    """The measure of a difference in `LargestError`, in words."""
    return f"RMS of ({difference}) / RMS" if spec.is_quantized else f"max |{difference}| / RMS"


def check_alone(
    candidate: ModelUnderTest, case: Case, outputs: Mapping[str, Array], spec: BuildSpec
) -> Iterator[Check]:
    """Each sample alone, without its padding, equals its rows in the batch: the batch invariance of all samples, and
    the padding length of those that the batch pads.

    outputs: of the batch; with the buckets of the case, if the candidate can be given buckets.
    """
    metric = metric_of("alone − in batch", spec)
    is_padded = not case.keep.all() and spec.attention.fixed_seq_len is None
    found = {kind: LargestError(spec) for kind in (Kind.BATCH_INVARIANCE, *[Kind.PADDING_LENGTH] * is_padded)}
    if spec.model.why_not_invariant:
        if not spec.model.why_samples_mix:  # about other lengths, nothing was declared
            del found[Kind.BATCH_INVARIANCE]
            yield check_independent(candidate, case, outputs, spec)
        yield from (not_run(kind, spec.model.why_not_invariant, case.label, metric) for kind in found)
        return
    is_long = {tensor.name: has_axes_of_tokens(tensor, spec) for tensor in spec.inputs}
    # a quantised model rounds by itself here: given roundings would hide a scale that depends on other samples
    uses_given = bool(candidate.given) and not spec.is_quantized and set(candidate.given) <= set(case.buckets)
    for row, keep in enumerate(case.keep):
        whole = keep.shape[-1]  # of several choices, as of one sequence
        length = int(np.nonzero(keep)[-1].max()) + 1 if spec.attention.fixed_seq_len is None else whole
        part = (slice(row, row + 1), *[slice(None)] * (keep.ndim - 1), slice(length))
        alone = {key: value[part if is_long[key] else part[:1]] for key, value in case.inputs.items()}
        if not candidate.accepts(alone):
            reason = f"sample {row} on its own {OUTSIDE}"
            yield from (not_run(kind, reason, case.label, metric) for kind in found)
            return
        if uses_given:
            given = {key: sample_buckets(value, row, length, spec) for key, value in case.buckets.items()}
            result, _ = candidate.run_with_given(alone, given)
        else:
            result = candidate.run(alone)
        for output in case.outputs:
            own, joined = result[output][0], outputs[output][row]
            if output in case.pooled:
                own, joined = (case.all_of(output, array, row) for array in (own, joined))
            else:
                own, joined = (array.reshape(len(array), -1) for array in (own, joined[:length]))
            for kind, worst in found.items():
                if kind == Kind.BATCH_INVARIANCE or length < whole:
                    worst.add(own, joined, f"worst in sample {row}")
    limit = limit_without(case, spec, "neither other samples nor padding may add to it")
    for kind, worst in found.items():
        yield judged(kind, case.label, metric, worst.error, limit, worst.detail)


def other_batches(count: int) -> Iterator[tuple[str, list[int]]]:
    """Batches of the samples of a case, by what they are: each alone; and all, several times, in the opposite order."""
    yield from (("alone", [row]) for row in range(count))
    yield "in another batch", [-1 - place % count + count for place in range(max(MIXED_ROWS, count))]


def rows_of(arrays: Mapping[str, Array], rows: Sequence[int], count: int) -> dict[str, Array]:
    """These samples of arrays with a batch of `count`, whose first axis may have several entries for each sample, as
    that of buckets has."""
    taken = {}
    for name, array in arrays.items():
        by_sample = array.reshape(count, -1, *array.shape[1:])[list(rows)]
        taken[name] = np.ascontiguousarray(by_sample.reshape(-1, *array.shape[1:]))
    return taken


def worst_of_batches(case: Case, outputs: Mapping[str, Array], spec: BuildSpec, run: RunRows) -> LargestError:
    """The largest difference that other batches make. outputs: of the case."""
    worst = LargestError(spec)
    for what, rows in other_batches(len(case.keep)):
        answer = run(rows)
        for output, whole in outputs.items():
            for place, row in enumerate(rows):
                detail = f"worst in {output} of sample {row} {what}"
                own = answer[output][place : place + 1]
                if own.shape[1:] != whole.shape[1:]:
                    worst.add(np.full((1, 1), np.nan), np.zeros((1, 1)), f"{detail}, whose shape is another one")
                    continue
                alike = np.broadcast_to(own, whole.shape)
                worst.add(case.kept(output, alike, row), case.kept(output, whole, row), detail)
    return worst


def check_independent(candidate: ModelUnderTest, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Each sample alone, and all in another batch, give what they give in the batch of the case.

    outputs: of the case; with its buckets, if the candidate can be given buckets.
    """
    kind, metric = Kind.BATCH_INVARIANCE, metric_of("other batch − batch", spec)
    count = len(case.keep)
    for _, rows in other_batches(count):
        if not candidate.accepts(rows_of(case.inputs, rows, count)):
            return not_run(kind, f"a batch of {len(rows)} {OUTSIDE}", case.label, metric)
    # a quantised model rounds by itself here: given roundings would hide a scale that depends on other samples
    uses_given = bool(candidate.given) and not spec.is_quantized and set(candidate.given) <= set(case.buckets)

    def run(rows: Sequence[int]) -> Mapping[str, Array]:
        inputs = rows_of(case.inputs, rows, count)
        if not uses_given:
            return candidate.run(inputs)
        return candidate.run_with_given(inputs, rows_of(case.buckets, rows, count))[0]

    worst = worst_of_batches(case, outputs, spec, run)
    limit = limit_without(case, spec, "other samples may not add to it")
    return judged(kind, case.label, metric, worst.error, limit, worst.detail)


def check_padding_content(
    candidate: ModelUnderTest, case: Case, outputs: Mapping[str, Array], spec: BuildSpec
) -> Check:
    """Kept tokens get the same answer whatever the padding contains."""
    kind, metric = Kind.PADDING_CONTENT, metric_of("change", spec)
    if spec.model.why_padding_counts:
        return not_run(kind, spec.model.why_padding_counts, case.label, metric)
    changed, worst = candidate.run(padding_of_other_content(case, spec)), LargestError(spec)
    for output in case.outputs:
        for row in range(len(case.keep)):
            actual, expected = case.kept(output, changed[output], row), case.kept(output, outputs[output], row)
            worst.add(actual, expected, f"worst in sample {row} of {output}")
    limit = limit_without(case, spec, "padding may not add to it")
    return judged(kind, case.label, metric, worst.error, limit, worst.detail)


def check_prefix(candidate: ModelUnderTest, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
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
    answer, worst = candidate.run(prefix), LargestError(spec)
    for output in case.outputs:
        for row in range(len(case.keep)):
            worst.add(answer[output][row], outputs[output][row, :length], "")
    limit = limit_without(case, spec, "later tokens may not add to it")
    return judged(kind, case.label, metric, worst.error, limit, f"prefix of {length} tokens")


def limit_without(case: Case, spec: BuildSpec, condition: str) -> Limit:
    """The limit of the arithmetic, with the condition that nothing else may use it up."""
    limit = free_limit(case, spec) if spec.is_quantized else case_limit(spec, case.own_error, case.spread)
    return Limit(limit.value, f"{limit.reason}; {condition}")


def sample_buckets(buckets: Array, row: int, length: int, spec: BuildSpec) -> Array:
    """The buckets of one sample, cropped to its length and padded to whole chunks."""
    hashes = spec.attention.hashes
    own = buckets[row * hashes.rows : (row + 1) * hashes.rows, :length]
    pad = -length % spec.attention.pad_multiple
    return np.pad(own, ((0, 0), (0, pad)), constant_values=hashes.buckets)


# Tokens of the export case that are decoded one by one.
CHECKED_TOKENS = 48
# Tokens that are decoded after the prompt of each case; of a short case, half.
STEPS_AFTER_PROMPT = 4


def check_decoder(decoder: DecodeRunner, cases: Sequence[Case], spec: BuildSpec) -> list[Check]:
    """The checks of a decode step and, if there is one, of a prefill.

    An engine is not asked for what lies outside its profiles.
    """
    first = prefix_of(cases[0], spec)
    checks = [check_if_accepted(check_decode_step, (Graph.STEP,), decoder, first, spec)]
    if decoder.has_prefill:
        checks.append(check_if_accepted(check_prefill_state, tuple(Graph), decoder, first, spec))
        checks += [check_if_accepted(check_prefill, tuple(Graph), decoder, case, spec) for case in cases]
    return checks


def check_if_accepted(
    check: Callable[[DecodeRunner, Case, BuildSpec], Check],
    graphs: Sequence[Graph],
    decoder: DecodeRunner,
    case: Case,
    spec: BuildSpec,
) -> Check:
    """A check that runs these graphs on a case, or one that was not run because one of them does not take the case."""
    batch, seq_len = case.keep.shape
    for graph in graphs:
        if not decoder.accepts(graph, batch, seq_len):
            return not_run(Kind.SHAPES, f"the {graph} of this case {OUTSIDE}", case.label)
    return check(decoder, case, spec)


def prefix_of(case: Case, spec: BuildSpec) -> Case:
    """The first tokens of a case, with their answers: a causal model gives the same with and without the rest."""
    output = spec.outputs[0].name
    seq_len = min(CHECKED_TOKENS, case.keep.shape[1])
    return replace(
        Case(
            f"first {seq_len} tokens",
            {key: value[:, :seq_len] for key, value in case.inputs.items()},
            {output: case.outputs[output][:, :seq_len]},
            exact={output: case.exact[output][:, :seq_len]} if case.exact else {},
        ),
        precision_noise=case.precision_noise,
    )


def check_decode_step(decoder: DecodeRunner, case: Case, spec: BuildSpec) -> Check:
    """Decoding token by token equals the reference's answer to the whole sequence."""
    name, output = spec.inputs[0].name, spec.outputs[0].name
    tokens = case.inputs[name]
    steps = [decoder.step({name: tokens[:, t : t + 1]})[output] for t in range(tokens.shape[1])]
    actual = {output: np.concatenate(steps, axis=1).astype(numpy_dtype(spec.dtype))}
    return check_answer(case, actual, arithmetic_limit(spec), Kind.DECODE_STEP, spec)


def check_answer(case: Case, actual: Mapping[str, Array], limit: Limit, kind: Kind, spec: BuildSpec) -> Check:
    """The answer of a decoder; of a quantised model, which rounds by itself here, its free run."""
    if spec.is_quantized:
        return judged(kind, case.label, RMS_METRIC, rms_change(case, actual), free_limit(case, spec))
    return check_arithmetic(case, actual, limit, kind)


def check_prefill_state(decoder: DecodeRunner, case: Case, spec: BuildSpec) -> Check:
    """The state after a prompt equals the state that the decoder has now, after a step with each of its tokens."""
    stepped = decoder.state
    decoder.reset()
    decoder.prefill(case.inputs)
    # not the built-in max, which may drop NaN
    measure = overall_error if spec.is_quantized else largest_error
    worst = float(np.max([state_error(decoder.state, stepped, name, measure) for name in stepped]))
    limit = free_limit(case, spec) if spec.is_quantized else arithmetic_limit(spec)
    return judged(Kind.PREFILL_STATE, case.label, RMS_METRIC if spec.is_quantized else METRIC, worst, limit)


def state_error(
    state: Mapping[str, Array], expected: Mapping[str, Array], name: str, measure: Callable[[Array, Array], float]
) -> float:
    """The largest error of one tensor of the state, [batch, …, channels], relative to the scale of its sample."""
    errors = [
        measure(own.reshape(-1, own.shape[-1]), wanted.reshape(-1, wanted.shape[-1]))
        for own, wanted in zip(state[name], expected[name], strict=True)
    ]
    return float(np.max(errors))


def check_prefill(decoder: DecodeRunner, case: Case, spec: BuildSpec) -> Check:
    """Reading the prompt of every sample at once, and then decoding its last tokens, equals the reference's answer to
    the whole sequence. What follows the prompt of a sample is masked, but is not empty."""
    name, output = spec.inputs[0].name, spec.outputs[0].name
    tokens, (batch, seq_len) = case.inputs[name], case.keep.shape
    places = np.arange(1, seq_len + 1)
    ends = (case.keep * places).max(axis=1)
    steps = np.minimum(STEPS_AFTER_PROMPT, case.keep.sum(axis=1) // 2)
    mask = case.keep & (places <= (ends - steps)[:, None])
    decoder.reset()
    actual = decoder.prefill({name: tokens, MASK_NAME: mask.astype(np.int64)})[output].astype(numpy_dtype(spec.dtype))
    rows = np.arange(batch)
    for _ in range(steps.max()):
        # a shorter sample goes on into its padding, which is not compared
        columns = decoder.position
        token = np.ascontiguousarray(tokens[rows, columns][:, None])
        actual[rows, columns] = decoder.step({name: token})[output][:, 0]
    return check_answer(case, {output: actual}, case_limit(spec, case.own_error), Kind.PREFILL, spec)


def check_encoder_decoder(model: EncoderDecoderRunner, case: Case, spec: BuildSpec) -> Check:
    """Reading the source of every sample at once, and decoding its target token by token, equals the reference's answer
    to both. Halfway, the samples trade places, as those of a beam search do."""
    name, output = model.token.name, spec.outputs[0].name
    tokens, order = case.inputs[name], list(range(len(case.keep)))
    actual = np.empty_like(case.outputs[output], dtype=numpy_dtype(spec.dtype))
    model.encode({tensor.name: case.inputs[tensor.name] for tensor in model.source})
    for column in range(tokens.shape[1]):
        if column == tokens.shape[1] // 2:
            order = order[::-1]
            model.state = rows_of(model.state, order, len(order))
        token = np.ascontiguousarray(tokens[order, column : column + 1])
        actual[order, column] = model.step({name: token})[output][:, 0]
    return check_answer(case, {output: actual}, case_limit(spec, case.own_error), Kind.DECODE_STEP, spec)
