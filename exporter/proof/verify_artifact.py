"""Checks an artifact again, in any runtime and against any reference: what `effexport verify` does.

The references are the choices of `verify --reference`, each a source of cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.artifact import Artifact, open_artifact
from effexport.base.dtypes import Array
from effexport.base.environment import require_torch
from effexport.base.errors import RuntimeFailedError, Unavailable, UserError
from effexport.base.runtimes import ARTIFACT_RUNTIMES, ENGINE_RUNTIMES, ORT_RUNTIMES
from effexport.base.spec import BuildSpec
from effexport.export.module_source import model_from_source
from effexport.export.onnx_graph import custom_ops_of_model, graph_inputs, graph_outline
from effexport.models.sources import ModelSource
from effexport.models.validation import did_you_mean, near_path
from effexport.proof.candidate import ModelCandidate, ModelUnderTest, engine_candidate
from effexport.proof.cases import Answers, Case, has_tokens, stored_cases
from effexport.proof.check import ALL_CASES, GOLDEN_SUFFIX, NAMED, Check, Kind, Trace, is_about_the_model, not_run
from effexport.proof.checks.arithmetic import check_buckets
from effexport.proof.inputs import REFERENCE_SEED_OFFSET
from effexport.proof.rebuilt_module import check_weights, model_of_artifact, why_not_rebuilt
from effexport.proof.trace import trace_if_possible
from effexport.proof.verify import ArtifactCandidate, Verification, case_to_trace
from effexport.quantize.record import is_unrounded
from effexport.runners.artifact_runner import model_opener
from effexport.runners.options import RunOptions
from effexport.runners.runner import FeedLimits, limits_from_spec, tensors_text
from effexport.tensorrt.sidecar import read_sidecar

if TYPE_CHECKING:
    from effexport.models.user.model import UserModel

EXPECTED = f"{', '.join(NAMED)}, FILE{GOLDEN_SUFFIX}, or PATH@RUNTIME, such as other/artifact@ort"
# New inputs: another draw than that of the golden file.
NEW_INPUTS_OFFSET = REFERENCE_SEED_OFFSET + 1
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class ReferenceChoice:
    """A parsed --reference.

    kind: one of NAMED, "file" or "runtime".
    path and runtime: of the last two. path: of "torch", too, if a file stands for the module.
    """

    kind: str
    path: Path = Path()
    runtime: str = ""

    @property
    def title(self) -> str:
        """The name of the reference in a verdict: a model that passes is equal to it."""
        titles = {"file": str(self.path), "runtime": self.option, "transformers": "transformers"}
        return titles.get(self.kind, str(self.path) if self.path.name else "PyTorch")

    @property
    def option(self) -> str:
        """The value of --reference."""
        return {"file": str(self.path), "runtime": f"{self.path}@{self.runtime}"}.get(self.kind, self.kind)

    @property
    def needs_module(self) -> bool:
        """True if nothing can be compared without the PyTorch module of the artifact."""
        return self.kind in ("torch", "transformers")


def parse_choice(text: str) -> ReferenceChoice:
    """Parse --reference. Raises UserError for an unknown reference, missing files, or without PyTorch."""
    if text in NAMED:
        if text in ("torch", "transformers"):
            require_torch(f"--reference {text}")
        return ReferenceChoice(text)
    path, at, runtime = text.rpartition("@")
    if at:
        known = tuple(ARTIFACT_RUNTIMES)
        if runtime not in known:
            raise UserError(
                f"--reference {text}: unknown runtime {runtime!r}{did_you_mean(runtime, known)} "
                f"Expected PATH@RUNTIME with one of: {', '.join(known)}"
            )
        if not path:
            raise UserError(f"--reference {text}: expected an artifact or an ONNX file before the @")
        return check_runtime_reference(ReferenceChoice("runtime", Path(path), runtime))
    if text.endswith(GOLDEN_SUFFIX):
        return ReferenceChoice("file", Path(text))
    if text and Path(text).exists():
        raise UserError(f"--reference {text} names no runtime; expected PATH@RUNTIME, such as {text}@ort")
    raise UserError(f"unknown --reference {text!r}{did_you_mean(text, NAMED)} Expected: {EXPECTED}")


def check_runtime_reference(choice: ReferenceChoice) -> ReferenceChoice:
    if not choice.path.exists():
        raise UserError(
            f"--reference {choice.title}: there is no {choice.path}"
            + (near_path(choice.path) or "; expected an artifact or an ONNX file before the @")
        )
    if choice.path.is_file() and choice.runtime in ENGINE_RUNTIMES:
        raise UserError(
            f"--reference {choice.title}: an engine belongs to an artifact, and {choice.path} is a file; expected the "
            "folder of an artifact, or one of: " + ", ".join(ORT_RUNTIMES)
        )
    return choice


def references_from_choice(
    choice: ReferenceChoice, artifact: Artifact, source: ModelSource | None, names: Sequence[str], on_stage: OnStage
) -> Iterator[Answers]:
    """The cases that an artifact is compared with. names: of the wanted cases; none: all.

    Raises UserError for a case that the reference does not have, a golden file that is none or of another model, and
    a runtime or transformers that is not installed.
    """
    missing = dict.fromkeys(names if artifact.spec.golden != "full" and choice.kind != "file" else ())
    for reference in all_references(choice, artifact, source, names, on_stage):
        check_cases(reference, artifact, choice)
        for name in (*(case.name for case in reference.cases), *(check.case.name for check in reference.checks)):
            missing.pop(name, None)
        yield reference
    for name in missing:
        raise UserError(
            f"there is no case {name!r} among the golden values that {artifact.path} keeps (--golden "
            f"{artifact.spec.golden}), and PyTorch was not run on it"
        )


def all_references(
    choice: ReferenceChoice, artifact: Artifact, source: ModelSource | None, names: Sequence[str], on_stage: OnStage
) -> Iterator[Answers]:
    from effexport.proof.other_answers import load_answers

    golden: list[Case] = []
    if choice.kind == "file":
        golden = load_answers(choice.path, artifact.spec)
    elif artifact.has_golden:
        golden = stored_cases(artifact.reference_path, artifact.spec)
    if choice.kind == "file" or artifact.spec.golden == "full":
        check_known(golden, names)
    cases = [case for case in golden if not names or case.name in names]
    if choice.kind in ("auto", "golden") and artifact.has_golden:
        on_stage("comparing with the golden file")
        yield Answers(cases, kind="golden")
    elif choice.kind == "file":
        on_stage(f"comparing with {choice.title}")
        yield Answers(cases, kind="file")
    elif choice.kind == "runtime":
        on_stage(f"comparing with {choice.title}")
        yield runtime_reference(choice, artifact, cases)
    if choice.kind in ("auto", "torch"):
        if cases and source is not None and source.is_original:
            on_stage("comparing with PyTorch on the stored inputs")
            yield answers_to_stored(artifact, model_from_source(source, artifact.spec), cases)
        on_stage("comparing with PyTorch on new inputs")
        yield torch_reference(choice, artifact, source, names)
    elif choice.kind == "transformers":
        yield from transformers_references(artifact, source, cases, names, on_stage)


def check_known(cases: Sequence[Case], names: Sequence[str]) -> None:
    """Raise UserError for the name of none of these cases."""
    known = [case.name for case in cases]
    for name in names:
        if name not in known:
            raise UserError(
                f"there is no case {name!r}{did_you_mean(name, known)} Expected: {', '.join(map(repr, known))}"
            )


def check_cases(reference: Answers, artifact: Artifact, choice: ReferenceChoice) -> None:
    """Raises UserError for cases with other inputs, outputs or hashes than the artifact has."""
    spec = artifact.spec
    inputs, outputs = {t.name for t in spec.inputs}, {t.name for t in spec.outputs}
    hashes = set(artifact.manifest.hash_values)
    for case in reference.cases:
        for what, given, expected in (
            ("inputs", set(case.inputs), inputs),
            ("outputs", set(case.outputs), outputs),
            ("hashes", set(case.buckets), hashes),
        ):
            if given != expected:
                raise UserError(
                    f"--reference {choice.title} is of another model: its {what} are {sorted(given)}; "
                    f"those of {artifact.path} are {sorted(expected)}"
                )


def torch_reference(
    choice: ReferenceChoice, artifact: Artifact, source: ModelSource | None, names: Sequence[str]
) -> Answers:
    """The PyTorch module itself, made again, on inputs of a new seed.

    Raises UserError if it was asked for and cannot be made again.
    """
    model = model_of_artifact(artifact, source)
    if isinstance(model, Unavailable):
        if choice.needs_module:
            raise UserError(f"--reference {choice.option}: {model}")
        return Answers(checks=[not_run(Kind.PYTORCH_MODULE, model.reason)])
    return new_answers(artifact, model, names)


def new_answers(artifact: Artifact, model: UserModel, names: Sequence[str]) -> Answers:
    """The answers of a model to new inputs, and the checks that they passed themselves."""
    from effexport.proof.reference import reference_from_model

    spec = artifact.spec
    return with_roundings(reference_from_model(model, spec, spec.seed + NEW_INPUTS_OFFSET, names), model, artifact)


def answers_to_stored(artifact: Artifact, model: UserModel, cases: Sequence[Case]) -> Answers:
    """The answers of a model to the inputs of stored cases, with their checks."""
    from effexport.proof.reference import answers_of_model

    answers = answers_of_model(model, artifact.spec, {case.name: case.inputs for case in cases})
    return with_roundings(answers, model, artifact)


def with_roundings(answers: Answers, model: UserModel, artifact: Artifact) -> Answers:
    """The answers of the quantised model, of an artifact that is quantised."""
    if (record := artifact.manifest.quantization) is None:
        return answers
    from effexport.proof.quantized import quantized_answers

    return quantized_answers(answers, model.module, artifact.spec, record)


def transformers_references(
    artifact: Artifact, source: ModelSource | None, golden: Sequence[Case], names: Sequence[str], on_stage: OnStage
) -> Iterator[Answers]:
    """transformers' answers to the golden inputs, then to new ones.

    Raises UserError for an artifact of no checkpoint, one that corrects what transformers computes, and without
    transformers.
    """
    from effexport.proof.other_answers import import_transformers, with_answers_of_transformers

    contract = artifact.spec.model
    if not contract.transformers_class:
        raise UserError(
            f"--reference transformers: {artifact.path} was not built from a checkpoint; expected an artifact of "
            "effexport build --checkpoint; for this one use --reference torch"
        )
    if reason := contract.why_not_as_published:
        raise UserError(f"--reference transformers: {reason}; use --reference torch")
    import_transformers()
    model = model_of_artifact(artifact, source)
    if isinstance(model, Unavailable):
        raise UserError(f"--reference transformers: {model}")
    assert source is not None
    assert source.path is not None
    if artifact.has_golden:
        on_stage("comparing with transformers on the golden inputs")
        yield with_answers_of_transformers(golden, artifact.spec, source.path)
    on_stage("comparing with transformers on new inputs")
    cases = new_answers(artifact, model, names).cases
    yield with_answers_of_transformers(cases, artifact.spec, source.path)


def runtime_reference(choice: ReferenceChoice, artifact: Artifact, cases: Sequence[Case]) -> Answers:
    """The answers of another model, or in another runtime, to the golden inputs.

    A model that hashes answers with the buckets of the case, so that its arithmetic can be compared; the buckets that
    it would have chosen itself are compared too, or a model with other rotations would pass.
    Raises UserError for another model, which cannot answer them.
    """
    result = Answers(kind="runtime")
    with contextlib.ExitStack() as stack:
        candidate, longest = opened_reference(choice, artifact, stack)
        for case in cases:
            seq_len = case.keep.shape[-1] if has_tokens(artifact.spec) else 1
            if longest is not None and seq_len > longest:
                reason = f"{choice.title} takes at most {longest} tokens"
            elif not candidate.accepts(case.inputs):
                reason = f"this case is outside the shapes that {choice.title} was built for"
            else:
                try:
                    outputs, buckets = answers(candidate, case)
                except RuntimeFailedError as error:
                    problem = str(error).splitlines()[0]
                    raise UserError(
                        f"--reference {choice.title} does not answer the golden inputs: {problem}"
                    ) from error
                result.cases.append(replace(case, outputs=outputs))
                result.checks += reference_buckets(case, buckets, artifact.spec)
                continue
            result.checks.append(not_run(Kind.REFERENCE, reason, case.label))
    return result


def reference_buckets(case: Case, buckets: Mapping[str, Array], spec: BuildSpec) -> Iterator[Check]:
    """Checks that a reference chooses the buckets of the case.

    buckets: its own; empty if it shows none.
    """
    for check in check_buckets(case, buckets, spec) if buckets else ():
        agreement = check.kind == Kind.BUCKET_AGREEMENT
        yield replace(check, kind=Kind.REFERENCE_BUCKETS if agreement else Kind.REFERENCE_NEAR_TIES)


def opened_reference(
    choice: ReferenceChoice, artifact: Artifact, stack: contextlib.ExitStack
) -> tuple[ModelUnderTest, int | None]:
    """The model of a choice, to be closed with the stack, and the longest sequence it takes."""

    if choice.path.is_file():
        hashes, path, limits = artifact.manifest.decisions, choice.path, FeedLimits()
    else:
        other = open_artifact(choice.path)
        hashes, path, limits = other.manifest.decisions, other.model_path, limits_from_spec(other.spec)
        if choice.runtime in ENGINE_RUNTIMES:
            check_same_model(choice, artifact, path, hashes)
            engine = other.engine_path(choice.runtime)
            candidate = engine_candidate(engine, read_sidecar(engine), path, other.spec, hashes)
            return stack.enter_context(candidate), limits.max_seq_len
    check_same_model(choice, artifact, path, hashes)
    open_model = model_opener(RunOptions(runtime=choice.runtime, memory_arena=False))
    return ModelCandidate(path, hashes, limits, open_model), limits.max_seq_len


def check_same_model(choice: ReferenceChoice, artifact: Artifact, path: Path, hashes: Sequence[str]) -> None:
    """Raises UserError for a model that cannot answer the cases: it lacks an input of the artifact, or it hashes in
    other layers, so that the buckets of a case do not fit it."""
    given, expected = graph_inputs(graph_outline(path)), artifact.spec.inputs
    if not {tensor.name for tensor in expected} <= {tensor.name for tensor in given}:
        raise UserError(
            f"--reference {choice.title} is another model: its inputs are {tensors_text(given)}; those of "
            f"{artifact.path} are {tensors_text(expected)}"
        )
    ours = artifact.manifest.hash_values
    hashes = [name for name in hashes if not is_unrounded(name)]
    if hashes and ours and set(hashes) != set(ours):
        raise UserError(
            f"--reference {choice.title} is of another model: it hashes in {', '.join(hashes)}; {artifact.path} in "
            f"{', '.join(ours)}"
        )


def answers(candidate: ModelUnderTest, case: Case) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """Float32 outputs, with the buckets of the case where the model shows its own: one that flips would change a third
    of all outputs. And its own buckets, if it shows them."""
    own: Mapping[str, Array] = {}
    if candidate.given and set(candidate.given) <= set(case.given):
        outputs, own = candidate.run_with_given(case.inputs, case.given)
        own = {name: array for name, array in own.items() if name in case.buckets}
    else:
        outputs = candidate.run(case.inputs)
    return {name: array.astype(np.float32) for name, array in outputs.items()}, own


@dataclass(frozen=True)
class VerifyRequest:
    """A comparison that the user asks for.

    choice: the reference.
    source: what the artifact was built from, if the user names it.
    cases: the names of those to check; none for all.
    trace: look for the first value inside the graph that differs, even if no check fails.
    data: a file whose answers are compared as well; see `answer_checks`.
    against: of `effexport prove`, the other model as the user names it; "" of `effexport verify`.
    notes: on the comparison.
    """

    choice: ReferenceChoice
    source: ModelSource | None = None
    cases: tuple[str, ...] = ()
    trace: bool = False
    data: Path | None = None
    against: str = ""
    notes: tuple[str, ...] = ()

    def check(self, candidate: ArtifactCandidate) -> None:
        """Refuse, before anything runs, what was asked for and cannot be compared. Raises UserError."""
        artifact = candidate.artifact
        reason = why_not_rebuilt(artifact, self.source)
        if not artifact.has_golden:
            none = f"{artifact.path} keeps no golden values (--golden none)"
            if self.choice.kind in ("golden", "runtime"):
                raise UserError(f"--reference {self.choice.option}: {none}; compare with --reference torch")
            if reason and self.choice.kind == "auto":
                raise UserError(f"{none}, and PyTorch cannot be run: {reason}")
        if reason and self.choice.needs_module:
            raise UserError(f"--reference {self.choice.option}: {reason}")
        if self.trace and (why := candidate.why_not_traced or reason):
            raise UserError(f"--trace: {why}")


def verify_artifact(
    candidate: ArtifactCandidate, request: VerifyRequest, on_stage: Callable[[str], None]
) -> tuple[Verification, Trace | Unavailable | None]:
    """Checks against the chosen references; and a trace, if it is asked for or a check has failed.

    Whatever the request names is compared, or has failed. Raises UserError for what cannot be compared.
    """
    candidate.check()
    request.check(candidate)
    artifact, spec, choice = candidate.artifact, candidate.artifact.spec, request.choice
    result, cases = Verification(candidate.check_products()), []
    if request.source is not None and artifact.manifest.weights_sha256:  # which a file alone does not say
        on_stage("comparing the weights")
        weights = check_weights(artifact, request.source)
        result.checks.append(weights)
        judged = choice.kind in ("auto", "torch", "transformers") and not request.source.is_original
        if weights.status == "failed" and judged:
            # a module of other weights cannot judge the model; the trace will show where it differs
            choice = ReferenceChoice("golden")
    for reference in references_from_choice(choice, artifact, request.source, request.cases, on_stage):
        if reference.cases:
            result += candidate.verify(reference.cases)
            cases += reference.cases
        result.checks += reference.checks
        whole = reference.cases and candidate.model in (None, artifact.model_path) and spec.decodes
        if whole and reference.kind == ("golden" if artifact.has_golden else "torch"):
            result += candidate.verify_decoder(reference.cases)
    # an engine has no function bodies: TensorRT has compiled them
    if not request.cases and not candidate.is_engine and custom_ops_of_model(candidate.path):
        on_stage("checking the function bodies of custom operators")
        result += candidate.verify_bodies(cases, result.implementation)
    result.checks = with_named_cases(result.checks, request.cases)
    case = case_to_trace(result.checks, cases, wanted=request.trace)
    if case is None:
        return result, None
    on_stage("tracing the values of the graph")
    found: Trace | Unavailable = Unavailable(candidate.why_not_traced)
    if not candidate.why_not_traced:
        found = trace_if_possible(candidate.path, artifact, request.source, case, candidate.options)
    if request.trace and (isinstance(found, Unavailable) or not found.values):
        result.checks.append(failed_trace(found))
    return result, found


def with_named_cases(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """The checks; a case that the user named and that nothing compared has failed."""
    compared = {check.case.name for check in checks if check.status != "not run" and is_about_the_model(check)}
    missing = set(names) - compared
    return [
        replace(check, status="failed", detail=f"--case asks for it, but {check.reason}", reason="")
        if check.status == "not run" and check.case.name in missing
        else check
        for check in checks
    ]


def failed_trace(found: Trace | Unavailable) -> Check:
    """A trace that was asked for and compared nothing."""
    if isinstance(found, Unavailable):
        detail = f"--trace asks for it, but {found}"
    else:
        detail = f"--trace asks for it, but none of the {found.pairable} values has kept its name in {found.model}"
    return Check(Kind.TRACE, ALL_CASES, "values compared", "failed", detail=detail)
