"""Checks a model file, an engine or an artifact against its references, for `build` and for `verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from effexport.artifact import DECODE_STEP, Artifact
from effexport.base.dtypes import Array
from effexport.base.errors import (
    EffexportError,
    RuntimeFailedError,
    RuntimeUnsupportedError,
    UserError,
    is_out_of_memory,
)
from effexport.base.runtimes import DEFAULT_RUNTIME, ENGINE_RUNTIMES, ORT_RUNTIMES, TENSORRT
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import custom_ops_of_model
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
from effexport.proof.cases import Arrays, Case
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
    SIGNATURE_METRIC,
    check_buckets,
    check_finite,
    check_float32_ops,
    check_free_run,
    check_hashed,
    check_long_sequence,
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
from effexport.proof.matching import check_nothing_lost, check_same_inputs
from effexport.proof.quantized import check_products, check_quantized
from effexport.proof.tolerances import foreign_limit, free_limit, rms_change
from effexport.runners.artifact_runner import (
    OpenModel,
    check_precision_of_model,
    decoder_from_artifact,
    encoder_decoder_from_artifact,
    model_opener,
)
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec
from effexport.tensorrt.sidecar import EngineMismatchError, read_sidecar


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
    given = run_with_given(candidate, case, spec) if candidate.given and is_known else None
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


def run_with_given(candidate: ModelUnderTest, case: Case, spec: BuildSpec) -> tuple[Arrays, Arrays] | None:
    """The answer with the decisions of a case, and those that the model would take. None where a user's model rounds
    arrays of other sizes than PyTorch: it may pad less, or send other tokens of zeros to an expert."""
    may_differ = bool(case.codes) and not spec.model.answers_always
    try:
        outputs, own = candidate.run_with_given(case.inputs, case.given)
    except (RuntimeFailedError, WrongShapeError) as error:
        if not may_differ or is_out_of_memory(error):
            raise
        return None
    differs = any(array.shape != case.codes[name].shape for name, array in own.items() if name in case.codes)
    return None if may_differ and differs else (outputs, own)


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
    settings = replace(settings, memory_arena=False)
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


def check_with_bodies(
    model: Path,
    case: Case,
    spec: BuildSpec,
    hashes: Sequence[str],
    open_with_bodies: OpenModel,
    computed: BuildSpec,
) -> Check:
    """The arithmetic of a whole model with its function bodies, in one case. computed: the spec with its limits."""
    kind = Kind.FUNCTION_BODIES
    try:
        limits = limits_from_spec(spec)
        given, values = opened_with_given(model, hashes, limits, open_with_bodies)
        answer = None
        if given is not None and set(values) <= set(case.given):
            answer = run_with_given(OpenedCandidate(given, given, values), case, spec)
        outputs = open_with_bodies(model, limits, None).run(case.inputs) if answer is None else answer[0]
    except (RuntimeUnsupportedError, RuntimeFailedError) as error:
        if spec.arithmetic == "bf16" and "NOT_IMPLEMENTED" in str(error):
            return not_run_in_bfloat16(kind, spec, error)
        detail = f"the model does not run without the kernel library: {str(error).splitlines()[0]}"
        return Check(kind, case.label, METRIC, "failed", detail=detail)
    checks = [check_signature(case, outputs, spec)]
    if checks[0].status == "passed" and spec.is_quantized and answer is None:
        checks = [judged(kind, case.label, RMS_METRIC, rms_change(case, outputs), foreign_limit(case, spec))]
    elif checks[0].status == "passed":
        checks = [*check_numbers(case, outputs, computed, kind)]
    worst = next((check for check in checks if check.status == "failed"), checks[0])
    return replace(worst, kind=kind)


def verify_decoding(artifact: Artifact, cases: Sequence[Case], options: RunOptions, target: str = "") -> Verification:
    """Check the graphs of an artifact that run token by token against the answers to whole sequences.

    target: of engines, as in --target. Raises UserError for engines that cannot run here.
    """
    spec = artifact.spec
    try:
        if spec.model.decoder is None:
            with decoder_from_artifact(artifact, options) as decoder:
                checks = check_decoder(decoder, cases, spec)
        else:
            with encoder_decoder_from_artifact(artifact, options) as model:
                checks = [check_encoder_decoder(model, case, spec) for case in cases]
    except RuntimeUnsupportedError as error:
        checks = [not_run_in_bfloat16(Kind.DECODE_STEP, spec, error)]
    return Verification([replace(check, target=target) for check in checks])


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


def if_it_runs(kind: Kind, target: str, verify: Callable[[], Verification]) -> Verification:
    """The checks of an engine; one that was not run if it cannot run on this machine."""
    try:
        # without the implementation: the report shows that of model.onnx, and the sidecar that of the engine
        return Verification(verify().checks)
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
        checks = [replace(c, target=info.target) for c in run_checks(candidate, cases, spec)]
    return Verification(checks, candidate.implementation)


@dataclass(frozen=True)
class ArtifactCandidate:
    """The model under test: the artifact's model, its engine, or another ONNX file instead of its model."""

    artifact: Artifact
    options: RunOptions
    model: Path | None

    @property
    def runtime(self) -> str:
        return self.options.runtime

    @property
    def is_engine(self) -> bool:
        return self.options.row.engine

    @property
    def own_precision(self) -> str:
        """The precision that the file computes in, if not the artifact's."""
        return ""

    @property
    def path(self) -> Path:
        """Raises UserError for an engine that the artifact does not have, or that is to be another ONNX file."""
        if not self.is_engine:
            return self.model or self.artifact.model_path
        if self.model is not None:
            raise UserError(
                f"--model names an ONNX file, and --runtime {self.runtime} runs the engine of the artifact; give one"
            )
        return self.artifact.engine_path(self.runtime)

    def check(self) -> None:
        """Raises UserError for options that the model or the runtime cannot follow."""
        check_precision_of_model(self.artifact.spec, self.options)
        if not self.is_engine and self.model is not None:
            check_same_inputs(self.model, self.artifact)
            check_nothing_lost(self.model, self.artifact.spec)
        if self.options.implementation == "kernel" and not custom_ops_of_model(self.path):
            raise UserError(
                f"--implementation kernel: {self.path} has no custom operators, so there is no kernel to check; "
                "leave it out"
            )

    @property
    def why_not_traced(self) -> str:
        """The reason why the values inside the graph cannot be read in this runtime; "" if they can."""
        if self.artifact.spec.is_quantized:
            return "the layers of a quantised model are compared where they round, and are not traced; leave it out"
        if self.runtime in ORT_RUNTIMES and self.options.row.provider != TENSORRT:
            return ""
        kind = f"a {self.runtime} engine" if self.is_engine else self.runtime
        return f"{kind} keeps no intermediate values; trace its model with --runtime {DEFAULT_RUNTIME}"

    def verify(self, cases: Sequence[Case]) -> Verification:
        spec, hashes = self.artifact.spec, self.artifact.manifest.decisions
        if self.is_engine:
            return verify_engine(self.path, self.artifact.model_path, cases, spec, hashes)
        return verify_in_runtime(self.path, cases, spec, hashes, self.opener(self.options), self.options.precision_hint)

    def opener(self, options: RunOptions) -> OpenModel:
        """Opens the file for the checks, under the names that the artifact has for its inputs and outputs."""
        return model_opener(options)

    def check_products(self) -> list[Check]:
        """A check of the products that a quantised file has quantised; an engine's network has other nodes."""
        record = self.artifact.manifest.quantization
        return [] if record is None or self.is_engine else [check_products(self.path, record)]

    def verify_decoder(self, cases: Sequence[Case]) -> Verification:
        """The graphs of the artifact that run token by token, or their engines."""
        artifact, target = self.artifact, self.runtime if self.is_engine else ""
        if self.runtime not in (*ORT_RUNTIMES, *ENGINE_RUNTIMES):
            reason = f"a decode step runs in ONNX Runtime or as an engine, not in {self.runtime}"
            return Verification([not_run(Kind.DECODE_STEP, reason)])
        if artifact.spec.model.decoder is not None and not self.options.row.grows_caches:
            reason = f"{self.runtime} does not run the decode steps of encoder-decoders"
            return Verification([not_run(Kind.DECODE_STEP, reason)])
        if self.is_engine and not artifact.has_engine(target, DECODE_STEP):
            reason = f"the artifact has no {target} engine of its decode step; build it again with --target {target}"
            return Verification([not_run(Kind.DECODE_STEP, reason, target=target)])
        return verify_decoding(artifact, cases, self.options, target)

    def verify_bodies(self, cases: Sequence[Case], ran: Mapping[str, str]) -> Verification:
        """Check what the file computes without the kernel library, as on any other machine: each function body by
        itself and, if kernels ran so far, the whole model with its bodies on a short padded case.

        ran: the implementation that the other checks ran, per operator.
        """
        spec, hashes = self.artifact.spec, self.artifact.manifest.decisions
        computed = spec.computed_in(self.own_precision) if self.own_precision else spec
        checks = check_function_bodies(self.path, computed)
        if "kernel" in ran.values() and cases:
            options = replace(self.options, implementation="body", memory_arena=False, precision_hint="")
            case = next((case for case in cases if case.name == SHORT_PADDED_CASE), cases[0])
            checks.append(check_with_bodies(self.path, case, spec, hashes, self.opener(options), computed))
        return Verification(checks)
