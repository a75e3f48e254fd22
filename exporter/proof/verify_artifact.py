"""Checks an artifact again, in any runtime and against any reference: what `effexport verify` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import DECODE_STEP, Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import Unavailable, UserError
from effexport.base.runtimes import DEFAULT_RUNTIME, ENGINE_RUNTIMES, ORT_RUNTIMES, TENSORRT
from effexport.base.spec import MASK_NAME, BuildSpec
from effexport.export.onnx_graph import (
    custom_ops_of_model,
    graph_inputs,
    graph_outline,
    graph_tensors,
    ops_without_body,
)
from effexport.models.sources import ModelSource
from effexport.plugins.ops import DOMAIN
from effexport.proof.cases import Case
from effexport.proof.check import ALL_CASES, Check, Kind, Trace, is_about_the_model, not_run
from effexport.proof.quantized import check_products
from effexport.proof.rebuilt_module import check_weights, why_not_rebuilt
from effexport.proof.reference_choice import ReferenceChoice, references_from_choice
from effexport.proof.trace import trace_if_possible
from effexport.proof.verify import (
    Verification,
    case_to_trace,
    verify_bodies,
    verify_decoding,
    verify_engine,
    verify_in_runtime,
)
from effexport.runners.artifact_runner import OpenModel, check_precision_of_model, model_opener
from effexport.runners.options import RunOptions

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class LostPart:
    """A part that a file can lose.

    tools: what is known to take it away, with the releases that were seen to do it; "" if nothing is known.
    remedy: what to do about it.
    """

    part: str
    tools: str
    remedy: str


BODIES = LostPart(
    "function bodies",
    "onnx.version_converter (onnx 1.23) drops them",
    "let the tool change a file that has no functions, made by: effexport inline ARTIFACT -o FILE",
)
NAMES = LostPart(
    "inputs or outputs",
    "onnxslim --inputs and --outputs (0.1.98) cut the graph, onnx.compose.add_prefix (onnx 1.23) renames them",
    "leave out these options, or verify the file with the artifact that it was made from",
)
# the one part that a file can have too much of
ADDED = LostPart(
    "additional inputs or outputs",
    "",
    "remove them, or verify the file with the artifact that it was made from",
)
TYPES = LostPart(
    "element types",
    "float16 of onnxconverter-common (1.16) and of onnxruntime.transformers (1.32) changes them without "
    "keep_io_types=True, onnxruntime.transformers.optimizer (1.32) with --input_int32",
    "let the tool keep the types of inputs and outputs; for float16 there, build an artifact with --precision fp16",
)
DIMS = LostPart(
    "dynamic dimensions",
    "onnxslim --input-shapes (0.1.98), onnxsim's overwrite_input_shapes (0.8.1) and "
    "onnxruntime.tools.make_dynamic_shape_fixed (1.32) replace them with numbers",
    "run the tool without fixed shapes: the checks need inputs of several shapes",
)


def check_nothing_lost(path: Path, spec: BuildSpec) -> None:
    """Raise UserError if a file lacks what every comparison with an artifact of this spec needs.

    That is: a body of each custom operator, inputs and outputs with their names and element types, and dynamic
    dimensions of the inputs. A file without bodies is refused even if kernels can run it here, because nothing else
    can. Also raises what `load_graph` raises, for example for a missing file with weights.
    """
    found = list(losses(graph_outline(path), spec))
    if not found:
        return
    reason = "it has more than the artifact" if {loss for loss, _ in found} == {ADDED} else "parts are lost"
    parts = []
    for number, (loss, text) in enumerate(found, start=1):
        known = f" Known: {loss.tools}." if loss.tools else ""
        counter = f"({number}) " if len(found) > 1 else ""
        parts.append(f"{counter}{loss.part}: {text}.{known} Remedy: {loss.remedy}")
    raise UserError(f"{path} cannot be compared with the artifact, because {reason}: {'; '.join(parts)}")


def check_same_inputs(path: Path, artifact: Artifact) -> None:
    """Raise UserError if nothing in a file resembles the data that the artifact reads: it has lost nothing, it is
    another model. A renamed input still has its type and rank; the mask is an input of nearly every model."""
    given, expected = graph_inputs(graph_outline(path)), artifact.spec.inputs
    data, theirs = ([tensor for tensor in inputs if tensor.name != MASK_NAME] for inputs in (expected, given))
    names = {tensor.name for tensor in theirs}
    kinds = {(tensor.dtype, len(tensor.dims)) for tensor in theirs}
    if not any(tensor.name in names or (tensor.dtype, len(tensor.dims)) in kinds for tensor in data):
        raise UserError(
            f"{path} is another model: its inputs are {listed(given)}; those of {artifact.path} are {listed(expected)}"
        )


def losses(model: onnx.ModelProto, spec: BuildSpec) -> Iterator[tuple[LostPart, str]]:
    """Each loss, and a text that names what is missing, or what is given and what was expected."""
    if ops := ops_without_body(model):
        yield (
            BODIES,
            f"{', '.join(f'{DOMAIN}::{op}' for op in ops)} have none, so only effexport's kernels could run the file",
        )
    given = {tensor.name: tensor for tensor in (*graph_inputs(model), *graph_tensors(model.graph.output))}
    expected = (*spec.inputs, *spec.outputs)
    both = f"the file has {listed(tuple(given.values()))}; expected {listed(expected)}"
    names = {tensor.name for tensor in expected}
    if set(given) != names:
        yield (ADDED if set(given) > names else NAMES), both
        return
    if any(given[tensor.name].dtype != tensor.dtype for tensor in expected):
        yield TYPES, both
    if any(is_fixed(given[tensor.name], tensor) for tensor in spec.inputs):
        yield DIMS, both


def is_fixed(given: TensorInfo, expected: TensorInfo) -> bool:
    """True if a dimension is a number that should be dynamic, or another number."""
    if len(given.dims) != len(expected.dims):
        return True
    return any(isinstance(dim, int) and dim != wanted for dim, wanted in zip(given.dims, expected.dims, strict=True))


def listed(tensors: Sequence[TensorInfo]) -> str:
    return ", ".join(map(str, tensors))


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
        """Check the file without the kernel library."""
        open_with_bodies = self.opener(
            replace(self.options, implementation="body", memory_arena=False, threads=None, precision_hint="")
        )
        spec, hashes = self.artifact.spec, self.artifact.manifest.decisions
        return verify_bodies(self.path, cases, spec, hashes, ran, open_with_bodies)

    def trace(self, source: ModelSource | None, case: Case) -> Trace | Unavailable:
        """The first values that differ from the module's on the inputs of one case."""
        if self.why_not_traced:
            return Unavailable(self.why_not_traced)
        return trace_if_possible(self.path, self.artifact, source, case, self.options)


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
