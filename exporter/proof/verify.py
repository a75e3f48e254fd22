"""Checks a model file or an engine against its reference: what `build` and `verify` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from effexport.artifact import Artifact
from effexport.base.dtypes import Array
from effexport.base.errors import (
    EffexportError,
    RuntimeFailedError,
    RuntimeUnsupportedError,
    UserError,
    is_out_of_memory,
)
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import custom_ops_of_model, load_graph, value_types
from effexport.plugins.ops import DOMAIN, OPS
from effexport.proof.candidate import (
    ModelCandidate,
    ModelUnderTest,
    OpenedCandidate,
    ShapeGuard,
    WrongShapeError,
    engine_candidate,
    open_in_ort,
    opened_with_given,
)
from effexport.proof.cases import Case
from effexport.proof.check import (
    ALL_CASES,
    METRIC,
    OUTSIDE,
    RMS_METRIC,
    CaseLabel,
    Check,
    Kind,
    is_about_bodies,
    judged,
    not_run,
)
from effexport.proof.checks.arithmetic import (
    FINITE_METRIC,
    SIGNATURE_METRIC,
    check_buckets,
    check_finite,
    check_free_run,
    check_hashed,
    check_numbers,
    check_repeatable,
    check_signature,
)
from effexport.proof.checks.function_bodies import check_function_bodies
from effexport.proof.checks.invariance import (
    check_alone,
    check_decoder,
    check_encoder_decoder,
    check_padding_content,
    check_prefix,
)
from effexport.proof.inputs import random_inputs
from effexport.proof.quantized import check_quantized
from effexport.proof.tolerances import foreign_limit, free_limit, rms_change
from effexport.runners.artifact_runner import OpenModel, decoder_from_artifact, encoder_decoder_from_artifact
from effexport.runners.decode import DecodeRunner
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec
from effexport.tensorrt.sidecar import EngineMismatchError, read_sidecar

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


def run_checks(
    candidate: ModelUnderTest, cases: Sequence[Case], spec: BuildSpec, precision_hint: str = ""
) -> Iterator[Check]:
    """Every check that applies, case by case. precision_hint: see RunOptions; its limits then apply."""
    computed = spec.computed_in(precision_hint) if precision_hint else spec
    guarded = ShapeGuard(candidate, spec)
    for index, case in enumerate(cases):
        if not candidate.accepts(case.inputs):
            yield not_run(Kind.SHAPES, f"this case {OUTSIDE}", case.label)
            continue
        try:
            outputs = candidate.run(case.inputs)
        except RuntimeFailedError as error:
            yield failed_run(case.label, error, spec)
            continue
        yield check_signature(case, outputs, spec)
        if set(outputs) == set(case.outputs) and all(outputs[n].shape == case.outputs[n].shape for n in outputs):
            checks = checks_of_answer(guarded, case, outputs, computed, index == 0)
            yield from up_to_wrong_shape(checks, case.label, spec)
    if spec.arithmetic != "fp32":
        yield from up_to_wrong_shape(check_long_sequence(guarded, cases, spec), ALL_CASES, spec)


def checks_of_answer(
    candidate: ModelUnderTest, case: Case, outputs: Mapping[str, Array], spec: BuildSpec, is_first: bool
) -> Iterator[Check]:
    """Every check of an answer that has the right names and shapes."""
    yield check_finite(case.label, outputs, case=case)
    yield check_repeatable(case, outputs, candidate.run(case.inputs))
    alike = outputs
    # a case whose roundings take too much room has none
    is_known = set(candidate.given) <= set(case.given) and set(case.codes) <= set(candidate.given)
    given = candidate.run_with_given(case.inputs, case.given) if candidate.given and is_known else None
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


def up_to_wrong_shape(checks: Iterator[Check], label: CaseLabel, spec: BuildSpec) -> Iterator[Check]:
    """The checks, up to one whose run failed, or returned another shape than expected: a failed check of that."""
    try:
        yield from checks
    except RuntimeFailedError as error:
        yield failed_run(label, error, spec)
    except WrongShapeError as error:
        yield Check(Kind.SIGNATURE, label, SIGNATURE_METRIC, "failed", detail=str(error))


def failed_run(label: CaseLabel, error: RuntimeFailedError, spec: BuildSpec) -> Check:
    """A failed check of a file that does not answer, with the message of the runtime.

    Raises the error again if this machine is at fault, or for a model of ours, which has no shapes that fail.
    """
    if spec.model.answers_always or is_out_of_memory(error):
        raise error
    return Check(Kind.RUNS, label, "the runtime answers", "failed", detail=" ".join(str(error).split()))


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


# Bodies are slow, and the kernels have passed the long cases.
SHORT_PADDED_CASE = "padded batch"


@dataclass
class Verification:
    """Checks of one model file. implementation: per custom operator, what ran: "kernel", "body" or "not run"."""

    checks: list[Check] = field(default_factory=list)
    implementation: dict[str, str] = field(default_factory=dict)

    def __iadd__(self, other: Verification) -> Verification:
        self.checks += other.checks
        self.implementation |= other.implementation
        return self


def verify_candidate(
    model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str], settings: RunOptions
) -> Verification:
    """Check a model file against reference cases in ONNX Runtime."""
    # every case has another shape and up to two sessions are open, so memory is released after each run
    settings = dataclasses.replace(settings, memory_arena=False)
    return verify_in_runtime(model, cases, spec, hashes, open_in_ort(settings))


def verify_in_runtime(
    model: Path,
    cases: Sequence[Case],
    spec: BuildSpec,
    hashes: Sequence[str],
    open_model: OpenModel,
    precision_hint: str = "",
) -> Verification:
    """Check a model file against reference cases in any runtime that reads ONNX files.

    precision_hint: the precision that the runtime computes in, if not the file's; see RunOptions.
    A bfloat16 model that cannot run here is reported as not run.
    """
    try:
        candidate = ModelCandidate(model, hashes, limits_from_spec(spec), open_model)
    except RuntimeUnsupportedError as error:
        check = not_run_in_bfloat16(Kind.PARITY, spec, error)
        return Verification([check], dict.fromkeys(custom_ops_of_model(model), "not run"))
    checks = [*run_checks(candidate, cases, spec, precision_hint), *check_float32_ops(model, spec)]
    return Verification(checks, candidate.implementation)


def verify_bodies(
    model: Path,
    cases: Sequence[Case],
    spec: BuildSpec,
    hashes: Sequence[str],
    ran: Mapping[str, str],
    open_with_bodies: OpenModel,
) -> Verification:
    """Check what a model computes without the kernel library, as on any other machine: each function body by itself
    and, if kernels ran so far, the whole model with its bodies on a short padded case.

    ran: the implementation that the other checks ran, per operator.
    open_with_bodies: opens models to run their bodies.
    """
    checks = check_function_bodies(model, spec)
    if "kernel" in ran.values() and cases:
        case = next((case for case in cases if case.name == SHORT_PADDED_CASE), cases[0])
        checks.append(check_with_bodies(model, case, spec, hashes, open_with_bodies))
    return Verification(checks)


def check_with_bodies(
    model: Path, case: Case, spec: BuildSpec, hashes: Sequence[str], open_with_bodies: OpenModel
) -> Check:
    """The arithmetic of a whole model with its function bodies, in one case."""
    kind = Kind.FUNCTION_BODIES
    try:
        limits = limits_from_spec(spec)
        given, values = opened_with_given(model, hashes, limits, open_with_bodies)
        if not set(values) <= set(case.given):
            given, values = None, {}
        candidate = OpenedCandidate(given or open_with_bodies(model, limits, None), given, values)
        if candidate.given:
            outputs, _ = candidate.run_with_given(case.inputs, case.given)
        else:
            outputs = candidate.run(case.inputs)
    except (RuntimeUnsupportedError, RuntimeFailedError) as error:
        if spec.arithmetic == "bf16" and "NOT_IMPLEMENTED" in str(error):
            return not_run_in_bfloat16(kind, spec, error)
        detail = f"the model does not run without the kernel library: {str(error).splitlines()[0]}"
        return Check(kind, case.label, METRIC, "failed", detail=detail)
    checks = [check_signature(case, outputs, spec)]
    if checks[0].status == "passed" and spec.is_quantized and not candidate.given:
        checks = [judged(kind, case.label, RMS_METRIC, rms_change(case, outputs), foreign_limit(case, spec))]
    elif checks[0].status == "passed":
        checks = [*check_numbers(case, outputs, spec, kind)]
    worst = next((check for check in checks if check.status == "failed"), checks[0])
    return dataclasses.replace(worst, kind=kind)


def verify_decoder(
    open_decoder: Callable[[], DecodeRunner], cases: Sequence[Case], spec: BuildSpec, target: str = ""
) -> Verification:
    """Check a decode step, and a prefill if there is one, against the answers to whole sequences.

    target: of engines, as in --target. Raises UserError for engines that cannot run here.
    """
    try:
        with open_decoder() as decoder:
            checks = check_decoder(decoder, cases, spec)
        return Verification([dataclasses.replace(check, target=target) for check in checks])
    except RuntimeUnsupportedError as error:
        return Verification([not_run_in_bfloat16(Kind.DECODE_STEP, spec, error)])


def verify_decoding(artifact: Artifact, cases: Sequence[Case], options: RunOptions, target: str = "") -> Verification:
    """Check the graphs of an artifact that run token by token, as `verify_decoder` does."""
    spec = artifact.spec
    if spec.model.decoder is None:
        return verify_decoder(lambda: decoder_from_artifact(artifact, options), cases, spec, target)
    try:
        with encoder_decoder_from_artifact(artifact, options) as model:
            return Verification([check_encoder_decoder(model, case, spec) for case in cases])
    except RuntimeUnsupportedError as error:
        return Verification([not_run_in_bfloat16(Kind.DECODE_STEP, spec, error)])


def not_run_in_bfloat16(kind: str, spec: BuildSpec, error: EffexportError) -> Check:
    """A check that was not run because this CPU has no kernels for bfloat16. Raises any other error again."""
    if spec.arithmetic != "bf16" or "NOT_IMPLEMENTED" not in str(error):
        raise error
    reason = f"ONNX Runtime has no bfloat16 kernels on this machine: {str(error).splitlines()[0]}"
    return not_run(kind, reason)


def case_to_trace(checks: Sequence[Check], cases: Sequence[Case], *, wanted: bool) -> Case | None:
    """The case of the first failed check. If none failed but a trace is wanted: a padded case, which uses most of the
    graph, or else the first. Checks of function bodies name the operator themselves."""
    for check in checks:
        if check.status == "failed" and not is_about_bodies(check):
            return next((case for case in cases if case.label == check.case), cases[0] if cases else None)
    if not wanted or not cases:
        return None
    return next((case for case in cases if not case.keep.all()), cases[0])


def verify_engine_if_possible(
    engine: Path, model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str]
) -> Verification:
    """The checks of `verify_engine`, or one that was not run if the engine cannot run on this machine."""
    target = read_sidecar(engine).target
    # without the implementation: the report shows that of model.onnx, and the sidecar that of the engine
    return if_it_runs(Kind.PARITY, target, lambda: verify_engine(engine, model, cases, spec, hashes).checks)


def verify_decode_engines_if_possible(
    folder: Path, target: str, cases: Sequence[Case], spec: BuildSpec
) -> Verification:
    """The checks of the engines of the decode step and the prefill in an artifact folder, or one that was not run if
    they cannot run on this machine."""
    from effexport.tensorrt.runner import decoder_in_trt

    def open_decoder() -> DecodeRunner:
        return decoder_in_trt(folder, target, limits_from_spec(spec))

    return if_it_runs(Kind.DECODE_STEP, target, lambda: verify_decoder(open_decoder, cases, spec, target).checks)


def if_it_runs(kind: Kind, target: str, checks: Callable[[], list[Check]]) -> Verification:
    """The checks of an engine; one that was not run if it cannot run on this machine."""
    try:
        return Verification(checks())
    except EngineMismatchError as error:
        problem = f"it {error.problem}"
    except UserError as error:
        problem = str(error)
    remedy = f"Prove it where it can run, with: effexport verify ARTIFACT --runtime {target}"
    reason = f"the engine was built and not run: {problem}. {remedy}"
    return Verification([not_run(kind, reason, target=target)])


def verify_engine(
    engine: Path, model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str]
) -> Verification:
    """Check an engine against reference cases. A case outside its profiles is reported as not run.

    Raises UserError if the engine cannot run: no GPU, another release of TensorRT, or built for other GPUs.
    """
    info = read_sidecar(engine)
    with engine_candidate(engine, info, model, spec, hashes) as candidate:
        checks = [dataclasses.replace(c, target=info.target) for c in run_checks(candidate, cases, spec)]
    return Verification(checks, candidate.implementation)
