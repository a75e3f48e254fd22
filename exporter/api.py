"""The verbs, as the command line and Python call them, and what opens artifacts: the public names of `effexport`.

A verb takes a record of options; `keywords` makes the Python function of it. What loads a framework is imported inside
the functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from effexport.base.errors import UserError, check_type
from effexport.base.option_fields import keywords, optional_path, path_of, python_errors
from effexport.base.runtimes import DEFAULT_RUNTIME
from effexport.options import (
    MODULE,
    BuildOptions,
    EvaluateOptions,
    ExportOptions,
    InspectOptions,
    Progress,
    ProveOptions,
    RefitOptions,
    SignOptions,
    VerifyOptions,
)

if TYPE_CHECKING:
    from torch import nn

    from effexport.artifact import Artifact
    from effexport.proof.named_module import NamedModule
    from effexport.report.inspection import Kind
    from effexport.report.report import Report
    from effexport.report.verified import Verified
    from effexport.runners.decode import DecodeRunner, EncoderDecoderRunner
    from effexport.runners.openvino.runner import OpenVinoRunner
    from effexport.runners.options import RunOptions
    from effexport.runners.ort.runner import OrtRunner
    from effexport.runners.runner import Runner
    from effexport.signature import Signed
    from effexport.tasks.figures import Evaluation
    from effexport.tasks.task import TextOptions
    from effexport.tasks.tasks import TextModel
    from effexport.tasks.text_generator import TextGenerator
    from effexport.tensorrt.runner import TrtRunner


@dataclass(frozen=True)
class BuildResult:
    """A new artifact and the report of its checks."""

    artifact: Artifact
    report: Report

    @property
    def path(self) -> Path:
        return self.artifact.path

    def __repr__(self) -> str:
        return f"<BuildResult {self.path}: {self.report!r}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


@keywords(ExportOptions)
def export(options: ExportOptions) -> BuildResult:
    """Export any nn.Module to ONNX and prove that the file computes what the module computes, as
    `effexport build --module` does.

        result = effexport.export(model, {"x": torch.randn(2, 197, 512)}, "artifacts/vit")

    Known attention layers anywhere in it are replaced by ours, with their weights, in a copy; everything else is
    exported as it stands. The module stays as it is, and its own answers in PyTorch are the reference.
    example_inputs: what the module is called with: a tensor, a tuple in the order of `forward`, or a dictionary by
    argument; numbers and booleans become constants. Without it, the inputs follow from the signature, if it has one
    argument or the names of transformers.
    output: the folder to write; by default artifacts/ and the class of the module.
    dynamic: the free axes by input, such as {"x": {0: "batch", 1: "seq"}}; by default the first axis is the batch, and
    the second, of vectors and of indices, the sequence.
    targets: TensorRT engines to build as well, "trt" or "trt-rtx".
    progress: called as each stage begins, see `Progress`.
    The other arguments are those of `build`: precision, seq_len, opset, calibration, force, …
    Raises UserError for a module or inputs that cannot work, and StageError if a stage or a check fails; then nothing
    is written.
    """
    if options.module is None:  # which `build` takes for "not given"
        raise UserError("module is None; expected an nn.Module: does the function that makes it return it?")
    return built(BuildOptions.of_export(options))


@keywords(BuildOptions)
def build(options: BuildOptions) -> BuildResult:
    """Export a model to ONNX, check it against PyTorch and write an artifact folder, as `effexport build` does.

        result = effexport.build(variant="lsh", seq_len=4096)
        result = effexport.build(module=my_encoder, output="artifacts/mine")

    Name one of variant, checkpoint (a folder) and module (an nn.Module, which stays as it is, or
    "package.module:factory"). docs/options.md lists all arguments.
    spec: a BuildSpec, a TOML file, or its contents as a dictionary, for fields of a variant that are not arguments.
    examples, dynamic: as for `export`.
    tokenizer: a folder with the tokenizer of the model; by default that of the checkpoint, and "none" leaves it out.
    output: the folder to write; by default artifacts/ and the name of the variant, checkpoint or module.
    targets: TensorRT engines that share their options; engines: TensorRT engines with options of their own.
    settings: how ONNX Runtime runs the model in the checks. progress: as for `export`.
    Raises UserError for a request that cannot work, and StageError if a stage or a check fails; then nothing is
    written.
    """
    return built(options)


def built(options: BuildOptions) -> BuildResult:
    """The result of a build."""
    from effexport.artifact import ARTIFACT_FOLDER
    from effexport.base.environment import require_torch
    from effexport.pipeline.build import artifact_from_spec
    from effexport.pipeline.quantization import QuantizationData
    from effexport.pipeline.request import BuildRequest, engines_of
    from effexport.tasks.evaluate import TaskData

    require_torch("effexport build")
    check_module(options.module)
    request = BuildRequest.of(options)
    options.run_options()  # refuses, before any work, what cannot run the check
    spec, source = request.resolve(lambda stage: options.progress(stage, None))
    quantizes = spec.is_quantized and spec.scales != "static" and not spec.inline
    if options.implementation == "kernel" and not spec.custom_ops and not quantizes:
        why = " with --inline" if spec.inline else f" with --carrier {spec.carrier}" if spec.is_carried else ""
        raise UserError(f"--implementation kernel: {spec.model.title}{why} has no custom operators; leave it out")
    engines = [*options.engines, *engines_of(options, spec)]
    folder = optional_path("output", options.output) or Path("artifacts") / source.name
    ARTIFACT_FOLDER.check(folder, force=options.force)
    labelled = optional_path("evaluate", options.evaluate)
    task = None if labelled is None else TaskData(labelled)
    quantization = QuantizationData(optional_path("calibration", options.calibration), task)
    artifact, report = artifact_from_spec(
        spec,
        folder,
        replace(options, engines=engines),
        source=source,
        tokenizer=request.tokenizer_source,
        quantization=quantization,
    )
    return BuildResult(artifact, report)


def check_module(module: object) -> None:
    """Raise UserError for a module that is something else, such as a class."""
    if module is None or isinstance(module, str):
        return
    from torch import nn

    check_type("module", module, nn.Module, MODULE)


@keywords(RefitOptions)
def refit(options: RefitOptions) -> BuildResult:
    """Put other weights of the same architecture into an artifact, as `effexport refit` does.

        effexport.refit("artifacts/lsh", weights="epoch2.safetensors")

    weights: a file for an artifact of a variant. checkpoint: a folder for an artifact of a checkpoint. module: for an
    artifact of your own module, the same with other weights; examples: as for `verify`. output: the folder to write; by
    default the artifact is replaced. settings, progress: as for `build`.
    Raises UserError for weights that do not fit, and StageError if a stage or a check fails; the old artifact then
    stays as it is.
    """
    return refitted(options)


def refitted(options: RefitOptions) -> BuildResult:
    from effexport.artifact import open_artifact
    from effexport.base.environment import require_torch
    from effexport.pipeline.build import artifact_from_refit
    from effexport.pipeline.refit import RefitRequest

    require_torch("effexport refit")
    weights = optional_path("weights", options.weights)
    request = RefitRequest(
        open_artifact(path_of("artifact", options.artifact)),
        weights,
        optional_path("checkpoint", options.checkpoint),
        optional_path("output", options.output),
        options.force,
        named_module(options.module, options.examples, weights),
    )
    shared = BuildOptions(settings=options.run_options(), progress=options.progress)
    return BuildResult(*artifact_from_refit(request, shared))


def named_module(module: nn.Module | str | None, examples: object, weights: Path | None) -> NamedModule | None:
    """The module of the user's own that a call names; None without one.

    Raises UserError for something else, and for examples without it.
    """
    from effexport.base.environment import require_torch
    from effexport.proof.named_module import NamedModule

    if module is None:
        if examples is not None:
            raise UserError("examples were given without a module; give both, or leave them out")
        return None
    require_torch("--module")
    check_module(module)
    return NamedModule(module, weights, examples)


@keywords(VerifyOptions)
def verify(options: VerifyOptions) -> Report:
    """Check an artifact, or another ONNX file of the same model, against PyTorch again, as `effexport verify` does.

        assert effexport.verify("artifacts/lsh", runtime="openvino").verdict == "passed"
        assert effexport.verify("artifacts/vit", module=model).verdict == "passed"

    module: the module that the artifact was built from, as for `build`, which PyTorch runs again; examples: what it is
    called with, by default the stored ones. docs/options.md lists all arguments. A check that fails does not raise: it
    makes the verdict of the report "failed".
    Raises UserError for an artifact, a file or a runtime that is not available, and for what was asked for and cannot
    be compared.
    """
    return verified(options).report


def verified(options: VerifyOptions) -> Verified:
    from effexport.artifact import open_artifact
    from effexport.proof.named_module import source_of_verify
    from effexport.proof.verify import ArtifactCandidate
    from effexport.proof.verify_artifact import VerifyRequest, parse_choice
    from effexport.report.formats import checked_output, written
    from effexport.report.verified import judged
    from effexport.signature import check_identity

    weights = optional_path("weights", options.weights)
    named = named_module(options.module, options.examples, weights)
    choice = parse_choice(options.reference)
    # cases have different shapes and up to two sessions are open, so memory is released after each run
    run_options = options.run_options(memory_arena=False)
    output, start = checked_output(options), time.perf_counter()
    folder = path_of("artifact", options.artifact)
    seal = check_identity(folder, options)
    artifact = open_artifact(folder)
    candidate = ArtifactCandidate(artifact, run_options, optional_path("model", options.model))
    source = source_of_verify(artifact, weights, named)
    request = VerifyRequest(choice, source, tuple(options.cases), options.trace, optional_path("data", options.data))
    result = judged(candidate, request, stages_of(options.progress), start)
    return replace(written(result, output, str(options.artifact)), seal=seal)


@keywords(ProveOptions)
def prove(options: ProveOptions) -> Report:
    """Check that any ONNX file computes what another model computes, as `effexport prove` does.

        report = effexport.prove("model.onnx", model, {"input_ids": ids, "attention_mask": mask})
        assert report.verdict == "passed", report.sentence

    model: an ONNX file of any exporter. against: an nn.Module, which stays as it is, "package.module:factory", the
    folder of an artifact, whose stored answers need no PyTorch, or another ONNX file. examples: as for `export`;
    without them, inputs are drawn as the file declares them. A check that fails does not raise.
    Raises UserError for files and models that cannot be compared, such as those of different inputs.
    """
    return proved(options).report


def proved(options: ProveOptions) -> Verified:
    from effexport.proof.prove import ProofRequest
    from effexport.report.formats import checked_output, written
    from effexport.report.verified import judged

    model, against = path_of("model", options.model), options.against
    check_module(None if isinstance(against, Path) else against)
    run_options = options.run_options(memory_arena=False)
    output, start = checked_output(options), time.perf_counter()
    on_stage = stages_of(options.progress)
    request = ProofRequest(model, against, options.examples, options.seq_len, options.trace, run_options, on_stage)
    return written(judged(*request.subject(), on_stage, start), output, str(options.model))


def stages_of(progress: Progress) -> Callable[[str], None]:
    """Report the beginning of each stage."""
    return lambda stage: progress(stage, None)


@keywords(SignOptions)
def sign(options: SignOptions) -> Signed:
    """Sign an artifact and its verdict, as `effexport sign` does, in place of earlier signatures.

        effexport.sign("artifacts/lsh", key="key.pem")
        effexport.verify("artifacts/lsh", identity="public.pem")

        effexport.sign("artifacts/lsh", sigstore=True)
        effexport.verify("artifacts/lsh", identity="ada@example.org", identity_provider="https://accounts.google.com")

    key: an elliptic-curve private key in PEM. docs/security.md says what is signed, and what Sigstore publishes.
    Raises UserError for a damaged artifact, for one with other files in it, and for another key; EffexportError if a
    service of Sigstore refuses.
    """
    return signed(options)


def signed(options: SignOptions) -> Signed:
    from effexport.artifact import open_artifact
    from effexport.signature import sign_artifact, signer_of

    artifact = open_artifact(path_of("artifact", options.artifact))
    key, trust_config = optional_path("key", options.key), optional_path("trust_config", options.trust_config)
    return sign_artifact(artifact, signer_of(key, options.sigstore, options.identity_token, trust_config))


@keywords(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> Evaluation:
    """Judge an artifact on labelled data or on a text, by itself or beside another model, as `effexport evaluate` does.

        found = effexport.evaluate("artifacts/writer", "held-out.txt", compare="torch")
        print(found.figure("bits per byte"), found.comparison.changes)

    data: a file, or the model's inputs and `labels` as arrays: [rows] for classes of rows, [rows, tokens] for tokens,
    -100 where nothing is asked. docs/options.md lists all arguments.
    Raises UserError for data that does not fit, and for a model or runtime that is not available.
    """
    return evaluated(options)


def evaluated(options: EvaluateOptions) -> Evaluation:
    from effexport.artifact import check_output_file, open_artifact
    from effexport.base.files import json_text, write_output
    from effexport.tasks.data import Windows
    from effexport.tasks.evaluate import EvaluatedModel, evaluate_artifact, other_subject

    output, weights = optional_path("output", options.output), optional_path("weights", options.weights)
    if output is not None:
        if output.suffix != ".json":
            raise UserError(f"-o {output}: expected a file name that ends in .json")
        check_output_file(output, force=options.force)
    if weights is not None and options.compare != "torch":
        raise UserError("--weights are those of the PyTorch module: give --compare torch too, or leave them out")
    data = options.data if isinstance(options.data, Mapping) else path_of("data", options.data)
    run_options = options.run_options()
    subject = EvaluatedModel(open_artifact(path_of("artifact", options.artifact)), run_options)
    other = None if options.compare is None else other_subject(options.compare, subject, weights)
    windows = Windows(options.window, options.stride, options.rows, options.seed)
    found = evaluate_artifact(subject, data, windows, other, lambda stage: options.progress(stage, None))
    if output is not None:
        write_output(output, json_text(found.to_dict()))
    return found


@dataclass(frozen=True)
class Description:
    """The content of a path. details: as `effexport inspect --json` prints them, by the kind."""

    kind: Kind
    path: Path
    details: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<Description of the {self.kind} {self.path}: {', '.join(self.details)}>"


@keywords(InspectOptions)
def inspect(options: InspectOptions) -> Description:
    """Describe an artifact folder, an ONNX file, a TensorRT engine or a checkpoint folder, as `effexport inspect` does.

    Raises UserError for a path that holds something else or is damaged.
    """
    return inspected(options)


def inspected(options: InspectOptions) -> Description:
    from effexport.report.inspection import describe

    path = path_of("path", options.path)
    kind, details = describe(path)
    return Description(kind, path, details)


@python_errors()
def report(artifact: str | Path) -> Report:
    """The report that an artifact was built with, as `effexport report` reads it; nothing is measured again.

    Raises UserError for a missing or damaged artifact.
    """
    from effexport.artifact import open_artifact
    from effexport.report.formats import report_of_artifact

    return report_of_artifact(open_artifact(path_of("artifact", artifact)))


@overload
def load(path: str | Path, settings: RunOptions | None = None) -> OrtRunner | OpenVinoRunner | TrtRunner: ...


@overload
def load(path: str | Path, *, runtime: str) -> Runner: ...


@python_errors()
def load(path: str | Path, settings: RunOptions | None = None, *, runtime: str | None = None) -> Runner:
    """Open an artifact folder in a runner, after checking every file against the manifest.

    Use it as a context manager or call `close`; `run` is thread-safe:

        with effexport.load("artifacts/lsh") as runner:
            outputs = runner.run({"input_ids": ids, "attention_mask": mask})

    settings: how to run the model; see `effexport.RunOptions`.
    runtime: instead of settings, the name of a runtime alone, as in --runtime: "ort-cuda", or "trt-rtx" for
    the engine of that target.
    Raises UserError for a missing or damaged artifact, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.runners.artifact_runner import checked_options, runner_from_artifact

    options = checked_options(settings, runtime)
    return runner_from_artifact(open_artifact(path_of("path", path)), options)


@python_errors()
def load_text(
    path: str | Path,
    settings: RunOptions | None = None,
    *,
    runtime: str | None = None,
    options: TextOptions | None = None,
) -> TextModel:
    """Open an artifact with a tokenizer to give it texts; it answers as transformers' pipeline of its task does.

        with effexport.load_text("artifacts/nystromformer") as fill_mask:
            answers = fill_mask("Paris is the [MASK] of France.")

    settings, runtime: as for `load`. options: how many answers, and how long texts are cut; an effexport.TextOptions.
    Raises UserError for an artifact that does not read text or answers no task, and MissingExtraError without the
    package tokenizers.
    """
    from effexport.artifact import open_artifact
    from effexport.runners.artifact_runner import checked_options, runner_from_artifact
    from effexport.tasks.task import DEFAULT_OPTIONS, TextOptions
    from effexport.tasks.tasks import TextModel, task_from_artifact

    run_options = checked_options(settings, runtime)
    check_type("options", options, (TextOptions, type(None)), "an effexport.TextOptions")
    artifact = open_artifact(path_of("path", path))
    task = task_from_artifact(artifact, options or DEFAULT_OPTIONS)
    return TextModel(runner_from_artifact(artifact, run_options), task, artifact.spec.batch)


@python_errors()
def load_decoder(path: str | Path, settings: RunOptions | None = None, *, runtime: str | None = None) -> DecodeRunner:
    """Open a causal artifact with a decode step, such as `linear`, to decode token by token with a state.

    settings: how to run it; see `effexport.RunOptions`.
    runtime: instead of settings, the name of a runtime alone, as in --runtime: "ort-cuda", or "trt-rtx" for the engines
    of that target, which keep the state on the GPU.
    Raises UserError for an artifact without a decode step, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.runners.artifact_runner import checked_options, decoder_from_artifact

    options = checked_options(settings, runtime)
    return decoder_from_artifact(open_artifact(path_of("path", path)), options)


@python_errors()
def load_encoder_decoder(
    path: str | Path, settings: RunOptions | None = None, *, runtime: str | None = None
) -> EncoderDecoderRunner:
    """Open an artifact of an encoder-decoder, such as LED, to read a source once and decode token by token.

    settings, runtime: as for `load`; "ort" or "ort-cuda".
    Raises UserError for another artifact, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.runners.artifact_runner import checked_options, encoder_decoder_from_artifact

    options = checked_options(settings, runtime)
    return encoder_decoder_from_artifact(open_artifact(path_of("path", path)), options)


@python_errors()
def load_generator(path: str | Path, *, runtime: str = DEFAULT_RUNTIME) -> TextGenerator:
    """Open a causal artifact with a decode step and logits, to continue texts.

        with effexport.load_generator("artifacts/linear") as generator:
            for piece in generator.stream("Once upon a time", effexport.Sampling(max_new_tokens=100)):
                print(piece, end="", flush=True)

    runtime: as in --runtime. Raises UserError for an artifact that cannot generate, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.runners.artifact_runner import checked_options, decoder_from_artifact
    from effexport.tasks.text_generator import generator_from_artifact

    options = checked_options(None, runtime)
    return generator_from_artifact(open_artifact(path_of("path", path)), lambda it: decoder_from_artifact(it, options))
