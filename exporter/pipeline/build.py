"""spec → module → ONNX → engines → report → artifact: the whole of `effexport build`, and of `effexport refit`."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from effexport.artifact import (
    ARTIFACT_FOLDER,
    DECODE_STEP,
    ENCODER,
    MODEL,
    PREFILL,
    REFERENCE,
    REPORT_HTML,
    REPORT_JSON,
    TRACED,
    Artifact,
    EngineEntry,
    artifact_in_progress,
    files_of_folder,
    open_artifact,
    write_manifest,
)
from effexport.base.environment import free_memory_bytes, require_build, versions
from effexport.base.errors import (
    EffexportError,
    RuntimeFailedError,
    StageError,
    Unavailable,
    UserError,
    is_out_of_memory,
)
from effexport.base.formatting import memory
from effexport.base.option_fields import optional_path
from effexport.base.quiet import quiet
from effexport.base.runtimes import engine_name
from effexport.base.spec import BuildSpec
from effexport.export.custom_nodes import replaced_note
from effexport.export.exported_model import write_export_json
from effexport.export.module_source import model_from_source, weights_digest
from effexport.export.onnx_graph import custom_ops_of_model, not_for_tensorrt, operators_of_model
from effexport.export.sizes_of_code import OtherSizesError, with_sizes_of_code
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.sources import ModelSource, source_from_seed
from effexport.options import NOTHING_GIVEN, BuildOptions, Progress
from effexport.pipeline.quantization import (
    NO_DATA,
    QuantizationData,
    QuantizedModel,
    cost_of_quantization,
    quantization_notes,
    quantization_of_build,
)
from effexport.pipeline.refit import RefitRequest, held_to_previous, other_architecture, refit_note
from effexport.plugins.ops import CONTRIB_DOMAIN, OPS
from effexport.proof.cases import (
    Answers,
    Case,
    keep_golden,
    save_reference,
    stored_cases,
    undefined_notes,
    why_not_of_spec,
)
from effexport.proof.check import OTHER_LAYER, Check, Kind, Trace
from effexport.proof.inputs import EXPORT, REFERENCE_SEED_OFFSET
from effexport.proof.module_runs import hash_modules
from effexport.proof.other_answers import is_original, original_cases, with_hashes
from effexport.proof.quantized import quantized_answers
from effexport.proof.trace import trace_if_it_runs
from effexport.proof.verify import ArtifactCandidate, Verification, case_to_trace, if_it_runs, verify_decoding
from effexport.report.compare import Side
from effexport.report.formats import html_from_report
from effexport.report.report import LayerError, Report, json_from_report, manifest_from_report, without_built
from effexport.report.wording import failure_lines
from effexport.runners.options import RunOptions
from effexport.runners.ort.session import ANY_OPSET, check_settings
from effexport.tasks.texts import NO_TOKENIZER, TokenizerSource, copy_tokenizer, tokenizer_of_refit
from effexport.tensorrt.bindings import import_api
from effexport.tensorrt.engine_from_onnx import engine_from_engine
from effexport.tensorrt.sidecar import summary_of_engine
from effexport.tensorrt.spec import EngineSpec, profile_remarks, within

if TYPE_CHECKING:
    from torch import nn

    from effexport.export.onnx_from_module import Written
    from effexport.models.user.model import UserModel


@dataclass
class Stopwatch:
    """Seconds per stage, and a callback that is called with the name of each stage as it begins.

    A stage for which memory does not suffice raises StageError.
    """

    on_stage: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.on_stage(name)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            if isinstance(error, EffexportError) or not is_out_of_memory(error):
                raise
            free = free_memory_bytes()
            room = "" if free is None else f" ({memory(free)} free)"
            raise StageError(name, f"not enough memory{room}; use a smaller --dim, --seq-len or --batch") from error
        self.seconds[name] = time.perf_counter() - start


@dataclass(frozen=True)
class Build:
    """A build whose module exists: what every later stage needs.

    hashes: graph values that hold buckets. previous: the artifact that gets other weights; None for a new one.
    quantized: what is quantised, None if nothing is.
    """

    spec: BuildSpec
    module: nn.Module
    hashes: Sequence[str]
    folder: Path
    model: Path
    settings: RunOptions
    watch: Stopwatch
    previous: Artifact | None
    quantized: QuantizedModel | None = None

    def artifact(self, engines: Sequence[EngineEntry] = ()) -> Artifact:
        """The artifact as far as it is written, for what runs the model before the build is finished."""
        found = artifact_in_progress(self.folder, self.spec)
        record = self.quantized.record if self.quantized else None
        known = {"hash_values": tuple(self.hashes), "quantization": record, "engines": tuple(engines)}
        return replace(found, manifest=msgspec.structs.replace(found.manifest, **known))


@with_sizes_of_code
def artifact_from_spec(
    spec: BuildSpec,
    output: Path,
    options: BuildOptions = NOTHING_GIVEN,
    *,
    source: ModelSource | None = None,
    tokenizer: TokenizerSource = NO_TOKENIZER,
    quantization: QuantizationData = NO_DATA,
    previous: Artifact | None = None,
) -> tuple[Artifact, Report]:
    """Build, check and write an artifact; `output` appears only when everything has succeeded.

    options: `engines` to build as well, `reference`, how the check runs, `trace`, `force` and `progress`; the other
    arguments say the rest. Without a GPU, engines are not checked, and the report says so. A build that fails is always
    traced.
    source: where the module comes from; None draws its weights from the seed.
    tokenizer: where the files come from that turn texts into tokens.
    quantization: the files that an int8 or fp8 build reads.
    previous: an artifact of the same spec. Its traced graphs are finished with the weights of `source`, which gives the
    files that an export of these would, and its refittable engines are refitted.
    Raises UserError when `output` cannot be written or TensorRT is not installed, and StageError when a stage or the
    parity check fails: then nothing is written, and the message contains the failed checks.
    """
    watch = Stopwatch(lambda stage: options.progress(stage, None))
    settings = options.run_options()
    reference = optional_path("reference", options.reference)
    source = source or source_from_seed(spec.model)
    engines = [replace(engine, profiles=tuple(within(p, spec) for p in engine.profiles)) for engine in options.engines]
    if spec.is_carried and engines:
        raise UserError(
            f"--carrier {spec.carrier} was given with the target {engines[0].target}, whose engines have our operator "
            "only; use --carrier own, or leave the target out"
        )
    originals = original_cases(reference, spec) if reference is not None else []
    quantization.check(spec, engines)
    with ARTIFACT_FOLDER.new(output, force=options.force) as folder:
        text_notes = copy_tokenizer(tokenizer, folder, spec.model.input_limits.get("input_ids"))
        with watch.stage("loading PyTorch and the ONNX exporter"):
            check_settings(settings, spec.opset_of_file)
            for engine in engines:
                import_api(engine.target)
            require_build()
        with watch.stage(f"making the {spec.model.title} module"):
            model = model_from_source(source, spec)
            module = model.module
            hashes, digest = list(hash_modules(module)), weights_digest(module)
            build = Build(spec, module, hashes, folder, folder / MODEL, settings, watch, previous)
        if spec.is_quantized:
            with watch.stage("choosing what to quantise"):
                build = replace(build, quantized=quantization_of_build(module, spec, folder, quantization))
        if previous is not None and TRACED in previous.manifest.files and spec.model.has_whole_state:
            shutil.copy(previous.traced_path, folder / TRACED)
            export = "putting the weights into the traced graphs"
        else:
            export = "exporting to ONNX"
        with watch.stage(export), held_to_previous(previous, source, build.model, folder / TRACED):
            written, build = write_graphs(build)
            spec = with_operators_of_graph(build.spec, build.model, written.carried)
            build = replace(build, spec=spec)
        with watch.stage("running the PyTorch reference"), quiet():
            answers = answers_from_model(model, spec)
            check_reference(answers.checks)
            check_axes(answers.cases, spec)
            if build.quantized is not None:
                answers = quantized_answers(answers, module, spec, build.quantized.record)
            save_reference([*answers.cases, *with_hashes(originals, module, spec)], folder / REFERENCE)
        # as written and read back: what is checked is what users get
        cases = stored_cases(folder / REFERENCE, spec)
        keep_golden(cases, folder / REFERENCE, spec)
        try:
            verification = prove_model(build, cases)
        except RuntimeFailedError as error:
            if reason := why_sizes_fail(build):
                problem = str(error).partition(": [")[0]
                raise StageError(
                    "parity", f"the exported model fails where the module does not: {problem}; {reason}"
                ) from error
            raise
        entries = [
            entry for engine in engines for entry in prove_engine(build, engine, cases, verification, options.progress)
        ]
        record = None
        if build.quantized is not None:
            with watch.stage("measuring what quantisation costs"):
                record, cost = cost_of_quantization(build.model, settings, spec, build.quantized, quantization)
                verification.checks += cost
        found = trace_model(build, verification, cases, wanted=options.trace)
        report = Report(
            title=spec.model.title,
            spec=spec.to_dict(),
            checks=[*answers.checks, *verification.checks],
            seconds=watch.seconds,
            environment=versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            runtime=settings.runtime,
            notes=[
                *source.notes,
                *spec.model.notes,
                *text_notes,
                *([] if spec.inline else [replaced_note(op, count) for op, count in written.replaced.items()]),
                *(carried_note(op, count, spec) for op, count in written.carried.items()),
                *undefined_notes(cases, spec),
                *not_for_tensorrt(build.model),
                *([] if previous is None else [refit_note(previous, source.origin, digest)]),
                *([f"--trace: {found.reason}"] if options.trace and isinstance(found, Unavailable) else []),
                *quantization_notes(record),
            ],
            quantization=record,
            implementation=verification.implementation,
            engines=entries,
            weights_from=source.origin,
            layers=[LayerError(**row) for row in found.layers()] if isinstance(found, Trace) else [],
        )
        if report.verdict == "failed":
            reasons = [blame(report.checks, reference), why_sizes_fail(build)]
            raise StageError("parity", *failure_lines(report.checks, found), *(f"  {why}" for why in reasons if why))
        if (folder / CONFIG).is_file():
            write_export_json(spec, build.model)
        sizes = {name: path.stat().st_size for name, path in files_of_folder(folder).items()}
        # the same if it is built again, in whatever folder
        kept = without_built(report)
        page = html_from_report(Side("", kept, sizes, spec.inputs, spec.outputs), ".")
        (folder / REPORT_JSON).write_text(json_from_report(kept), encoding="utf-8")
        (folder / REPORT_HTML).write_text(page, encoding="utf-8")
        write_manifest(folder, manifest_from_report(report, spec, build.hashes, digest))
    return open_artifact(output), report


def artifact_from_refit(request: RefitRequest, options: BuildOptions = NOTHING_GIVEN) -> tuple[Artifact, Report]:
    """Put other weights into an artifact, with the checks of a build; its folder changes only if all have passed.

    Results and errors as for `artifact_from_spec`; also raises as `RefitRequest.resolve`.
    """
    source, engines = request.resolve()
    tokenizer, text_notes = tokenizer_of_refit(request.artifact, request.checkpoint)
    try:
        return artifact_from_spec(
            request.artifact.spec,
            request.place,
            replace(options, engines=engines, force=request.replaces),
            source=replace(source, notes=(*source.notes, *text_notes)),
            tokenizer=tokenizer,
            previous=request.artifact,
        )
    except OtherSizesError as error:
        raise UserError(other_architecture(source, request.artifact, str(error))) from error


def answers_from_model(model: UserModel, spec: BuildSpec) -> Answers:
    """The reference: PyTorch's answers, of the user's own model if the module is a copy of one."""
    from effexport.proof.reference import reference_from_model

    answers = reference_from_model(model, spec, spec.seed + REFERENCE_SEED_OFFSET)
    if spec.model.independent_samples and not any(check.kind == Kind.INDEPENDENT for check in answers.checks):
        title = spec.model.title
        raise StageError("reference", f"{title} answers no batch, so nothing shows that its samples are independent")
    return answers


def write_graphs(build: Build) -> tuple[Written, Build]:
    """Export the model, and its graphs that run token by token. Returns what is written of the model, and the build
    with the names that quantised graphs have. Raises UserError for a carrier that nothing needs."""
    from effexport.export.onnx_from_module import GraphFile, onnx_from_module, onnx_of_decoder, onnx_with_state
    from effexport.models.checkpoints.seq2seq import SourceEncoder, TargetStep
    from effexport.models.encoder.module import DecodeStep, Prefill

    module, spec, quantized = build.module, build.spec, build.quantized
    record, traced = None, build.folder / TRACED
    if quantized is not None:
        module, record = quantized.module, quantized.record
    written = onnx_from_module(module, spec, build.model, traced, record)
    if written.changes.sizes and build.previous is not None:
        raise OtherSizesError(EXPORT, written.changes.sizes)
    if spec.is_carried and not written.carried:
        raise UserError(spec.why_not_carried)
    build = replace(build, spec=written.changes.applied(spec))
    if spec.has_decode_step:
        for kind, name in ((DecodeStep, DECODE_STEP), (Prefill, PREFILL)):
            onnx_with_state(kind, module, GraphFile(build.folder / name, spec, traced, record))
    if spec.model.decoder is not None:
        encoder, step = (GraphFile(build.folder / name, spec, traced) for name in (ENCODER, DECODE_STEP))
        onnx_of_decoder((SourceEncoder, TargetStep), module, (encoder, step))
    if quantized is not None and record is not None:
        known = {product.layer for product in record.products}
        products = (*record.products, *(p for p in written.products if p.layer not in known))
        record = msgspec.structs.replace(
            record, unrounded=written.unrounded, products=products, custom_ops=written.linear
        )
        build = replace(build, quantized=replace(quantized, record=record))
    return written, build


def with_operators_of_graph(spec: BuildSpec, model: Path, carried: Counter[str]) -> BuildSpec:
    """The spec with the numbers of operators that the graph of a user's own module has: also of those of users, and
    without those that were replaced by their bodies. carried: those that another operator stands for."""
    if not spec.model.is_traced_as_found:
        return spec
    found = dict(Counter(operators_of_model(model)) + carried)
    if spec.inline or found == spec.model.custom_ops(spec.fused):
        return spec
    from effexport.export.written_attention import remarks_on_written

    remarks = remarks_on_written(found, spec.custom_ops)
    return replace(spec, model=spec.model.with_custom_ops(found, spec.fused, remarks))


def carried_note(op: str, count: int, spec: BuildSpec) -> str:
    """For the report: which operator stands for one of ours, and what it takes to run it."""
    nodes = f"{op}: {count} node{'s' * (count > 1)} became"
    if spec.carrier == "contrib":
        return f"{nodes} {CONTRIB_DOMAIN}::{OPS[op].carrier}, which ONNX Runtime runs without the kernel library."
    return (
        f"{nodes} ONNX's {OPS[op].carrier}, so the file has opset {spec.opset_of_file}. ONNX Runtime "
        f"{versions()['onnxruntime']} opens it where {ANY_OPSET} is 0, and runs the operator's function body."
    )


def blame(checks: Sequence[Check], reference: Path | None) -> str:
    """The end of the message about failed checks: that weights or options are wrong, if only the original differs."""
    failed = [check for check in checks if check.status == "failed"]
    if not all(is_original(check.case.name) for check in failed):
        return ""
    return (
        "the exported model computes what its PyTorch module computes, and both differ from the answers in "
        f"{reference}: check which tensor of the original became which, their scales, and the options of the spec"
    )


def why_sizes_fail(build: Build) -> str:
    """Lines of the user's own module that may have tied the export to some sizes; "" if there are none."""
    if not build.spec.model.is_traced_as_found:
        return ""
    from effexport.export.onnx_from_module import example_inputs, modes_of_users_code
    from effexport.export.specialised_length import assumed_sizes
    from effexport.export.user_program import UserProgram

    spec = build.spec
    with quiet(streams=True), modes_of_users_code(build.module, spec):
        return assumed_sizes(UserProgram(build.module, example_inputs(spec), spec.inputs, spec).trace())


def check_reference(checks: Sequence[Check]) -> None:
    """Raise StageError if PyTorch's own answers have failed a check: they cannot judge a model then."""
    for check in checks:
        if check.kind == Kind.INDEPENDENT and check.status == "failed":
            found = "" if check.value is None else f": {check.metric} is {check.value:.2g}, the limit {check.limit:.2g}"
            raise StageError(
                "reference",
                f"samples were declared independent, and are not ({check.case}): {check.detail}{found}; leave "
                "--independent-samples out, or change what mixes them",
            )
    if wrong := [check for check in checks if check.kind == Kind.REPLACEMENT and check.status == "failed"]:
        if any(OTHER_LAYER in check.detail for check in wrong):
            reason = (
                "a layer of effexport does not compute what the layer that it stands for computes, so nothing was "
                "written: its package may have been changed, or effexport is at fault"
            )
        else:
            reason = (
                "each layer of effexport, given the inputs of the layer that it stands for, gives its result, so "
                "the model magnifies the rounding of float32 on these inputs, and nothing could be judged: give "
                "example inputs like those that it was trained on, or check its weights"
            )
        raise StageError("reference", *failure_lines(wrong), f"  {reason}")
    if any(check.status == "failed" for check in checks):
        disputes = [f"  {c.detail}" for c in checks if c.kind == Kind.REFERENCE_REPEATABLE and c.detail]
        raise StageError(
            "reference",
            *failure_lines(checks),
            "  PyTorch in float32 is further from PyTorch in float64 than rounding explains, "
            "so the exported model was not judged. Weights whose products cancel in float32 do this; otherwise try "
            "OMP_NUM_THREADS=1 or another release of PyTorch",
            *disputes,
        )


def check_axes(cases: Sequence[Case], spec: BuildSpec) -> None:
    """Raise StageError for an answer that does not have the axes of the spec: every later reader would refuse it."""
    for case in cases:
        if problem := why_not_of_spec(case, spec):
            raise StageError(
                "reference",
                f"the axes that were found for {spec.model.title} do not hold in the case {case.name!r}: {problem}; "
                "name the free axes of its inputs with dynamic, or in --inputs",
            )


def prove_model(build: Build, cases: Sequence[Case]) -> Verification:
    """Check the model in ONNX Runtime, its function bodies if it has any, and its decoder if it has one."""
    spec, watch = build.spec, build.watch
    # every case has another shape and up to two sessions are open, so memory is released after each run
    candidate = ArtifactCandidate(build.artifact(), replace(build.settings, memory_arena=False), None)
    with watch.stage("checking parity in ONNX Runtime"):
        result = candidate.verify(cases)
    if custom_ops_of_model(build.model):
        with watch.stage("checking the function bodies of custom operators"):
            result += candidate.verify_bodies(cases, result.implementation)
    if spec.decodes:
        with watch.stage(f"checking the decode step and the {'prefill' if spec.has_decode_step else 'encoder'}"):
            result += verify_decoding(build.artifact(), cases, build.settings)
    return result


def prove_engine(
    build: Build, engine: EngineSpec, cases: Sequence[Case], result: Verification, on_progress: Progress
) -> list[EngineEntry]:
    """Build the engine of the model and, if it has them, of its decode step and its prefill into the artifact; check
    them if this machine can run them, and add their checks to `result`."""
    spec, target = build.spec, engine.target
    remarks = tuple(profile_remarks(engine.profiles, spec))
    entries = [build_engine(build, engine, MODEL, on_progress, remarks)]
    if spec.has_decode_step:
        entries += [build_engine(build, engine, model, on_progress) for model in (DECODE_STEP, PREFILL)]
    candidate = ArtifactCandidate(build.artifact(entries), RunOptions(runtime=target), None)
    with build.watch.stage(f"checking parity of the {target} engine"):
        result += if_it_runs(Kind.PARITY, target, lambda: candidate.verify(cases))
        if spec.has_decode_step:
            result += if_it_runs(Kind.DECODE_STEP, target, lambda: candidate.verify_decoder(cases))
    return entries


def build_engine(
    build: Build, engine: EngineSpec, model: str, on_progress: Progress, remarks: tuple[str, ...] = ()
) -> EngineEntry:
    """Build the engine of one of the artifact's ONNX files into the artifact, or refit that of the previous one."""
    what, name = "" if model == MODEL else f" of {model}", engine_name(engine.target, model)
    with build.watch.stage(f"building the {engine.target} engine{what}"):
        info = engine_from_engine(
            None if build.previous is None else build.previous.path / name,
            build.folder / model,
            engine,
            build.folder / name,
            precision=build.spec.precision,
            remarks=remarks,
            on_progress=on_progress,
        )
    return msgspec.convert(summary_of_engine(info), EngineEntry)


def trace_model(
    build: Build, result: Verification, cases: Sequence[Case], *, wanted: bool
) -> Trace | Unavailable | None:
    """Compare the values inside the graph with PyTorch's if a check has failed or a trace is wanted."""
    case = case_to_trace(result.checks, cases, wanted=wanted)
    if case is None:
        return None
    with build.watch.stage("tracing the values of the graph"), quiet():
        return trace_if_it_runs(build.model, build.model, build.module, build.spec, case, build.settings)
