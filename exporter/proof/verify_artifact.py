"""Checks an artifact again, in any runtime and against any reference: what `effexport verify` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from effexport.artifact import DECODE_STEP, Artifact
from effexport.errors import Unavailable, UserError
from effexport.export.onnx_graph import custom_ops_of_model
from effexport.models.sources import ModelSource
from effexport.proof.case_label import ALL_CASES
from effexport.proof.cases import Case
from effexport.proof.checks.quantized import check_products
from effexport.proof.checks.result import Check, Kind, is_about_the_model, not_run
from effexport.proof.lost_parts import check_nothing_lost, check_same_inputs
from effexport.proof.references.choice import ReferenceChoice, references_from_choice
from effexport.proof.references.rebuilt_module import check_weights, why_not_rebuilt
from effexport.proof.trace.trace import Trace
from effexport.proof.trace.trace_from_model import trace_if_possible
from effexport.proof.verify import (
    Verification,
    case_to_trace,
    verify_bodies,
    verify_decoder,
    verify_in_runtime,
)
from effexport.proof.verify_engine import verify_engine
from effexport.runners.artifact_decoder import decoder_from_artifact
from effexport.runners.artifact_runner import check_precision_of_model, model_opener
from effexport.runners.decode import DecodeRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import ModelOptions
from effexport.runtimes import ENGINE_RUNTIMES, ORT_RUNTIMES, RUNTIMES


@dataclass(frozen=True)
class Candidate:
    """The model under test: the artifact's model, its engine, or another ONNX file instead of its model."""

    artifact: Artifact
    runtime: str
    options: ModelOptions
    model: Path | None

    @property
    def is_engine(self) -> bool:
        return RUNTIMES[self.runtime].engine

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
        """Why the values inside the graph cannot be read in this runtime; "" if they can."""
        if self.artifact.spec.is_quantized:
            return "the layers of a quantised model are compared where they round, and are not traced; leave it out"
        if self.runtime in ORT_RUNTIMES and self.settings.provider != "tensorrt":
            return ""
        kind = f"a {self.runtime} engine" if self.is_engine else self.runtime
        return f"{kind} keeps no intermediate values; trace its model with --runtime ort"

    @property
    def settings(self) -> OrtSettings:
        """Of ONNX Runtime, for a runtime that is one of its providers."""
        return OrtSettings(
            ORT_RUNTIMES[self.runtime].provider, self.options.implementation, device_id=self.options.device
        )

    def verify(self, cases: Sequence[Case]) -> Verification:
        spec, hashes = self.artifact.spec, self.artifact.manifest.decisions
        if self.is_engine:
            return verify_engine(self.path, self.artifact.model_path, cases, spec, hashes)
        open_model = model_opener(self.runtime, self.options)
        return verify_in_runtime(self.path, cases, spec, hashes, open_model, self.options.precision_hint)

    def check_products(self) -> list[Check]:
        """Whether a quantised file has quantised what it should, and nothing else; an engine's network has other
        nodes."""
        record = self.artifact.manifest.quantization
        return [] if record is None or self.is_engine else [check_products(self.path, record)]

    def verify_decoder(self, cases: Sequence[Case]) -> Verification:
        """The decode step and the prefill of the artifact, or their engines."""
        artifact, target = self.artifact, self.runtime if self.is_engine else ""
        if self.runtime not in (*ORT_RUNTIMES, *ENGINE_RUNTIMES):
            reason = f"a decode step runs in ONNX Runtime or as an engine, not in {self.runtime}"
            return Verification([not_run(Kind.DECODE_STEP, reason)])
        if self.is_engine and not artifact.has_engine(target, DECODE_STEP):
            reason = f"the artifact has no {target} engine of its decode step; build it again with --target {target}"
            return Verification([not_run(Kind.DECODE_STEP, reason, target=target)])

        def open_decoder() -> DecodeRunner:
            return decoder_from_artifact(artifact, self.runtime, self.options)

        return verify_decoder(open_decoder, cases, artifact.spec, target)

    def verify_bodies(self, cases: Sequence[Case], ran: Mapping[str, str]) -> Verification:
        """What the file computes without the kernel library."""
        open_with_bodies = model_opener(
            self.runtime, ModelOptions("body", memory_arena=False, device=self.options.device)
        )
        spec, hashes = self.artifact.spec, self.artifact.manifest.decisions
        return verify_bodies(self.path, cases, spec, hashes, ran, open_with_bodies)

    def trace(self, source: ModelSource | None, case: Case) -> Trace | Unavailable:
        """The first values that differ from the module's on the inputs of one case."""
        if self.why_not_traced:
            return Unavailable(self.why_not_traced)
        return trace_if_possible(self.path, self.artifact, source, case, self.settings)


@dataclass(frozen=True)
class Request:
    """What a model is to be compared with. source: what the artifact was built from, if the user names it.

    cases: the names of those to check; none for all. trace: whether to look for the first value inside the graph that
    differs, even if no check fails. data: whose answers are compared as well; see evaluation/changed_answers.py.
    """

    choice: ReferenceChoice
    source: ModelSource | None = None
    cases: tuple[str, ...] = ()
    trace: bool = False
    data: Path | None = None

    def check(self, candidate: Candidate) -> None:
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
    candidate: Candidate, request: Request, on_stage: Callable[[str], None]
) -> tuple[Verification, Trace | Unavailable | None]:
    """Checks against the chosen references; and a trace, if it is asked for or a check has failed.

    Whatever the request names is compared, or has failed. Raises UserError for what cannot be compared.
    """
    candidate.check()
    request.check(candidate)
    artifact, spec, choice = candidate.artifact, candidate.artifact.spec, request.choice
    result, cases = Verification(candidate.check_products()), []
    if request.source is not None:
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
        whole = reference.cases and candidate.model in (None, artifact.model_path) and spec.has_decode_step
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
    found = candidate.trace(request.source, case)
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
