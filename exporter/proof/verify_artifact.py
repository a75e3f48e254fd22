"""Checks an artifact again, in any runtime and against any reference: what `effexport verify` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from effexport.artifact import Artifact
from effexport.errors import Unavailable, UserError
from effexport.export.onnx_graph import custom_ops_of_model
from effexport.proof.cases import Case
from effexport.proof.checks.result import Kind, not_run
from effexport.proof.references.choice import ReferenceChoice, references_from_choice
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
from effexport.runners.artifact_runner import check_precision_of_model, model_opener
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import ModelOptions
from effexport.runtimes import ORT_RUNTIMES, RUNTIMES


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

    @property
    def settings(self) -> OrtSettings:
        """Of ONNX Runtime, for a runtime that is one of its providers."""
        return OrtSettings(ORT_RUNTIMES[self.runtime].provider, self.options.implementation)

    def verify(self, cases: Sequence[Case]) -> Verification:
        check_precision_of_model(self.artifact.spec, self.options)
        spec, hashes = self.artifact.spec, self.artifact.manifest.hash_values
        if self.is_engine:
            return verify_engine(self.path, self.artifact.model_path, cases, spec, hashes)
        open_model = model_opener(self.runtime, self.options)
        return verify_in_runtime(self.path, cases, spec, hashes, open_model, self.options.precision_hint)

    def verify_bodies(self, cases: Sequence[Case], ran: Mapping[str, str]) -> Verification:
        """What the file computes without the kernel library."""
        open_with_bodies = model_opener(self.runtime, ModelOptions("body", memory_arena=False))
        spec, hashes = self.artifact.spec, self.artifact.manifest.hash_values
        return verify_bodies(self.path, cases, spec, hashes, ran, open_with_bodies)

    def trace(self, weights: Path | None, case: Case) -> Trace | Unavailable:
        """The first values that differ from the module's on the inputs of one case."""
        if self.runtime not in ORT_RUNTIMES:
            kind = f"a {self.runtime} engine" if self.is_engine else self.runtime
            return Unavailable(f"{kind} keeps no intermediate values; trace its model with --runtime ort")
        return trace_if_possible(self.path, self.artifact, weights, case, self.settings)


def verify_artifact(
    candidate: Candidate,
    weights: Path | None,
    choice: ReferenceChoice,
    names: Sequence[str],
    trace: bool,
    on_stage: Callable[[str], None],
) -> tuple[Verification, Trace | Unavailable | None]:
    """Checks against the chosen references; and a trace, if it is asked for or a check has failed."""
    artifact, spec = candidate.artifact, candidate.artifact.spec
    result, cases = Verification(), []
    for reference in references_from_choice(choice, artifact, weights, names, on_stage):
        if reference.cases:
            result += candidate.verify(reference.cases)
            cases += reference.cases
        result.checks += reference.checks
        if reference.kind == "golden" and candidate.path == artifact.model_path and spec.model.has_decode_step:
            if candidate.runtime in ORT_RUNTIMES:
                step, prefill = artifact.decode_step_path, artifact.prefill_path
                result += verify_decoder(step, prefill, reference.cases, spec, candidate.settings)
            else:
                reason = f"a decode step runs in ONNX Runtime only, not in {candidate.runtime}"
                result.checks.append(not_run(Kind.DECODE_STEP, reason))
    # an engine has no function bodies: TensorRT has compiled them
    if not names and not candidate.is_engine and custom_ops_of_model(candidate.path):
        on_stage("checking the function bodies of custom operators")
        result += candidate.verify_bodies(cases, result.implementation)
    case = case_to_trace(result.checks, cases, wanted=trace)
    if case is None:
        return result, None
    on_stage("tracing the values of the graph")
    return result, candidate.trace(weights, case)
