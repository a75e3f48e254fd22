"""A decoder against the answers to whole sequences: token by token, and after a prompt, or a source, that is read at
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from effexport.base.dtypes import Array, numpy_dtype
from effexport.base.spec import MASK_NAME, BuildSpec
from effexport.proof.cases import Case
from effexport.proof.check import METRIC, OUTSIDE, RMS_METRIC, Check, Kind, Limit, judged, not_run
from effexport.proof.checks.arithmetic import check_arithmetic
from effexport.proof.checks.invariance import rows_of
from effexport.proof.metrics import largest_error, overall_error, rms_change
from effexport.proof.tolerances import arithmetic_limit, case_limit, free_limit
from effexport.runners.decode import DecodeRunner, Graph
from effexport.runners.encoder_decoder import EncoderDecoderRunner

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
    tokens, lengths = case.inputs[name], case.keep.sum(axis=1)
    batch, seq_len = case.keep.shape
    steps = np.minimum(STEPS_AFTER_PROMPT, lengths // 2)
    mask = np.arange(seq_len) < (lengths - steps)[:, None]
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
