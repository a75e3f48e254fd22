"""The commands as Python functions, and what opens artifacts: the public names of `effexport`.

Everything but types is imported inside the functions, so that `import effexport` loads no framework.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from effexport.runtimes import ARTIFACT_RUNTIMES, DEFAULT_RUNTIME

if TYPE_CHECKING:
    from torch import nn

    from effexport.artifact import Artifact
    from effexport.description import Kind
    from effexport.dtypes import Array
    from effexport.evaluation.figures import Evaluation
    from effexport.generation.text_generator import TextGenerator
    from effexport.proof.named_module import NamedModule
    from effexport.report.model import Report
    from effexport.runners.decode import DecodeRunner
    from effexport.runners.openvino.runner import OpenVinoRunner
    from effexport.runners.options import RunOptions
    from effexport.runners.ort.runner import OrtRunner
    from effexport.runners.runner import Runner
    from effexport.spec import BuildSpec
    from effexport.tensorrt.runner import TrtRunner
    from effexport.tensorrt.spec import EngineSpec
    from effexport.text.task import TextOptions
    from effexport.text.tasks import TextModel

# Called with the name of a stage as it begins, and None; and while TensorRT builds an engine, with what it is doing and
# how much of that is done, 0 to 1.
Progress = Callable[[str, float | None], None]


def quiet(stage: str, share: float | None) -> None:
    """Ignore progress."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise a spec or a checkpoint that cannot work as a UserError, like everything else that users can mend."""
    from effexport.errors import UserError
    from effexport.models.validation import SpecError

    try:
        yield
    except SpecError as error:
        raise UserError(str(error)) from error


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


def export(
    module: nn.Module,
    example_inputs: object = None,
    output: str | Path | None = None,
    *,
    dynamic: Mapping[str, object] | None = None,
    precision: str = "fp32",
    targets: Sequence[str] = (),
    progress: Progress = quiet,
    **options: Any,
) -> BuildResult:
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
    precision: fp32, fp16, bf16, int8 or fp8. targets: TensorRT engines to build as well, "trt" or "trt-rtx", with the
    default profile. progress: called as each stage begins, see `Progress`. options: as for `build`: seq_len, opset,
    calibration, force, …
    Raises UserError for a module or inputs that cannot work, and errors.StageError if a stage or a check fails; then
    nothing is written.
    """
    from effexport.errors import UserError

    if module is None:  # which `build` takes for "not given"
        raise UserError("module is None; expected an nn.Module: does the function that makes it return it?")
    return build(
        output=output,
        module=module,
        examples=example_inputs,
        dynamic=dynamic,
        precision=precision,
        targets=targets,
        progress=progress,
        **options,
    )


def build(
    spec: BuildSpec | str | Path | None = None,
    output: str | Path | None = None,
    *,
    variant: str | None = None,
    checkpoint: str | Path | None = None,
    module: nn.Module | str | None = None,
    weights: str | Path | None = None,
    inputs: str | Path | None = None,
    examples: object = None,
    dynamic: Mapping[str, object] | None = None,
    tokenizer: str | Path | None = None,
    reference: str | Path | None = None,
    calibration: str | Path | None = None,
    evaluate: str | Path | None = None,
    settings: RunOptions | None = None,
    targets: Sequence[str] = (),
    engines: Sequence[EngineSpec] = (),
    trace: bool = False,
    force: bool = False,
    progress: Progress = quiet,
    **options: Any,
) -> BuildResult:
    """Export a model to ONNX, check it against PyTorch and write an artifact folder, as `effexport build` does.

        result = effexport.build(variant="lsh", seq_len=4096)
        result = effexport.build(module=my_encoder, output="artifacts/mine")

    Name one of spec (a BuildSpec or a TOML file), variant, checkpoint (a folder) and module (an nn.Module, which stays
    as it is, or "package.module:factory"). weights: a safetensors file for a variant.
    inputs: a TOML file that describes the inputs of the module. examples, dynamic: as for `export`.
    tokenizer: a folder with the tokenizer of the model; by default that of the checkpoint, and "none" leaves it out.
    reference: a safetensors file with inputs and answers of the model that the weights come from, to compare with.
    calibration: with precision int8 or fp8, samples of what the model will read; evaluate: labelled data of its task.
    options: the other fields of the spec, named as the flags: seq_len, causal, precision, …
    output: the folder to write; by default artifacts/ and the name of the variant, checkpoint or module.
    targets: TensorRT engines with the default profile; engines: TensorRT engines with options of their own.
    settings: how ONNX Runtime runs the model in the checks. progress: as for `export`.
    Raises UserError for a request that cannot work, and errors.StageError if a stage or a check fails; then nothing is
    written.
    """
    from effexport.artifact import ARTIFACT_FOLDER
    from effexport.build import artifact_from_spec
    from effexport.build_quantization import QuantizationData, with_scales_for_engines
    from effexport.build_request import BuildRequest
    from effexport.environment import require_torch
    from effexport.errors import check_type
    from effexport.evaluation.evaluate import TaskData
    from effexport.spec import BuildSpec
    from effexport.tensorrt.spec import EngineSpec, check_target, profiles_from_texts

    require_torch("effexport.build")
    check_build_types(variant, module, settings, engines)
    check_type("targets", targets, (list, tuple), "a list of names, such as ['trt-rtx']")
    check_texts(**{f"targets[{i}]": target for i, target in enumerate(targets)})
    wanted = spec if isinstance(spec, BuildSpec) else optional_path("spec", spec)
    request = BuildRequest(
        with_scales_for_engines({"variant": variant, **options}, (*targets, *engines)),
        wanted,
        optional_path("checkpoint", checkpoint),
        optional_path("weights", weights),
        module,
        optional_path("inputs", inputs),
        examples,
        dynamic,
        optional_path("tokenizer", tokenizer),
    )
    with user_errors():
        for target in targets:
            check_target(target)
        resolved, source = request.resolve(lambda stage: progress(stage, None))
        profiles = profiles_from_texts((), resolved) if targets else ()
        wanted_engines = [*engines, *(EngineSpec(target=target, profiles=profiles) for target in targets)]
        folder = optional_path("output", output) or Path("artifacts") / source.name
        ARTIFACT_FOLDER.check(folder, force=force)
        labelled = optional_path("evaluate", evaluate)
        task = None if labelled is None else TaskData(labelled)
        artifact, found = artifact_from_spec(
            resolved,
            folder,
            source=source,
            engines=wanted_engines,
            tokenizer=request.tokenizer_source,
            settings=settings,
            reference=optional_path("reference", reference),
            quantization=QuantizationData(optional_path("calibration", calibration), task),
            trace=trace,
            force=force,
            on_stage=lambda stage: progress(stage, None),
            on_progress=progress,
        )
    return BuildResult(artifact, found)


def check_build_types(variant: object, module: object, settings: RunOptions | None, engines: object) -> None:
    """Raise UserError for arguments of `build` that have another type than expected, other than paths."""
    from effexport.errors import check_type
    from effexport.tensorrt.spec import EngineSpec

    check_type("variant", variant, (str, type(None)), "the name of a variant")
    check_module(module)
    check_settings(settings)
    check_type("engines", engines, (list, tuple), "a list of EngineSpec")
    assert isinstance(engines, (list, tuple))
    for engine in engines:
        check_type("an item of engines", engine, EngineSpec, "an EngineSpec")


def check_module(module: object) -> None:
    """Raise UserError for a module that is something else, such as a class."""
    from torch import nn

    from effexport.errors import check_type

    check_type(
        "module", module, (nn.Module, str, type(None)), "an nn.Module, not its class, or 'package.module:factory'"
    )


def refit(
    artifact: str | Path,
    *,
    weights: str | Path | None = None,
    checkpoint: str | Path | None = None,
    module: nn.Module | str | None = None,
    examples: object = None,
    output: str | Path | None = None,
    settings: RunOptions | None = None,
    force: bool = False,
    progress: Progress = quiet,
) -> BuildResult:
    """Put other weights of the same architecture into an artifact, as `effexport refit` does.

        effexport.refit("artifacts/lsh", weights="epoch2.safetensors")

    weights: a file for an artifact of a variant. checkpoint: a folder for an artifact of a checkpoint. module: for an
    artifact of your own module, the same with other weights; examples: as for `verify`. output: the folder to write; by
    default the artifact is replaced. settings, progress: as for `build`.
    Raises UserError for weights that do not fit, and errors.StageError if a stage or a check fails; the old artifact
    then stays as it is.
    """
    from effexport.artifact import open_artifact
    from effexport.build import artifact_from_refit
    from effexport.environment import require_torch
    from effexport.refit_request import RefitRequest

    require_torch("effexport.refit")
    check_settings(settings)
    with user_errors():
        request = RefitRequest(
            open_artifact(path_of("artifact", artifact)),
            optional_path("weights", weights),
            optional_path("checkpoint", checkpoint),
            optional_path("output", output),
            force,
            named_module(module, examples, optional_path("weights", weights), "effexport.refit"),
        )
        refitted, found = artifact_from_refit(
            request, settings=settings, on_stage=lambda stage: progress(stage, None), on_progress=progress
        )
    return BuildResult(refitted, found)


def named_module(
    module: nn.Module | str | None, examples: object, weights: Path | None, what: str
) -> NamedModule | None:
    """The module of the user's own that a call names; None without one. what: names the call, if PyTorch is missing.

    Raises UserError for something else, and for examples without it.
    """
    from effexport.environment import require_torch
    from effexport.errors import UserError
    from effexport.proof.named_module import NamedModule

    if module is None:
        if examples is not None:
            raise UserError("examples were given without a module; give both, or leave them out")
        return None
    require_torch(what)
    check_module(module)
    return NamedModule(module, weights, examples)


def verify(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    weights: str | Path | None = None,
    module: nn.Module | str | None = None,
    examples: object = None,
    runtime: str = DEFAULT_RUNTIME,
    implementation: str = "auto",
    device: int = 0,
    precision_hint: str = "",
    reference: str = "auto",
    data: str | Path | None = None,
    cases: str | Sequence[str] = (),
    trace: bool = False,
    progress: Progress = quiet,
) -> Report:
    """Check an artifact, or another ONNX file of the same model, against PyTorch again, as `effexport verify` does.

        assert effexport.verify("artifacts/lsh", runtime="openvino").verdict == "passed"
        assert effexport.verify("artifacts/vit", module=model).verdict == "passed"

    module: the module that the artifact was built from, as for `build`, which PyTorch runs again; examples: what it is
    called with, by default the stored ones. The other arguments have the names and values of the flags; cases may be
    one name or several. A check that fails does not raise: it makes the verdict of the report "failed".
    Raises UserError for an artifact, a file or a runtime that is not available, and for what was asked for and cannot
    be compared.
    """
    import time

    from effexport.artifact import open_artifact
    from effexport.errors import check_type
    from effexport.evaluation.evaluate import answer_checks
    from effexport.proof.named_module import source_of_verify
    from effexport.proof.reference_choice import parse_choice
    from effexport.proof.verify_artifact import ArtifactCandidate, VerifyRequest, verify_artifact
    from effexport.report.verified import report_from_verification
    from effexport.runners.artifact_runner import options_from_flags

    check_texts(runtime=runtime, implementation=implementation, precision_hint=precision_hint, reference=reference)
    names = (cases,) if isinstance(cases, str) else cases
    check_type("cases", names, (list, tuple), "a name or a list of names")
    check_type("device", device, int, "the number of a GPU")
    for case in names:
        check_type("an item of cases", case, str, "the name of a case")
    choice = parse_choice(reference)
    options = options_from_flags(
        runtime, implementation=implementation, device=device, precision_hint=precision_hint, memory_arena=False
    )
    start = time.perf_counter()
    with user_errors():
        candidate = ArtifactCandidate(
            open_artifact(path_of("artifact", artifact)), options, optional_path("model", model)
        )
        named = named_module(module, examples, optional_path("weights", weights), "effexport.verify(module=…)")
        source = source_of_verify(candidate.artifact, optional_path("weights", weights), named)
        request = VerifyRequest(choice, source, tuple(names), trace, optional_path("data", data))
        answers, quality = answer_checks(candidate, request, lambda stage: progress(stage, None))
        verification, found = verify_artifact(candidate, request, lambda stage: progress(stage, None))
    verification.checks += answers
    return report_from_verification(candidate, request, verification, found, quality, time.perf_counter() - start)


def evaluate(
    artifact: str | Path,
    data: str | Path | Mapping[str, Array],
    *,
    compare: str | None = None,
    weights: str | Path | None = None,
    window: int | None = None,
    stride: int = 0,
    rows: int | None = None,
    seed: int = 0,
    runtime: str = DEFAULT_RUNTIME,
    implementation: str = "auto",
    device: int = 0,
    precision_hint: str = "",
    progress: Progress = quiet,
) -> Evaluation:
    """Judge an artifact on labelled data or on a text, by itself or beside another model, as `effexport evaluate` does.

        found = effexport.evaluate("artifacts/writer", "held-out.txt", compare="torch")
        print(found.figure("bits per byte"), found.comparison.changes)

    data: a file, or the model's inputs and `labels` as arrays: [rows] for classes of rows, [rows, tokens] for tokens,
    -100 where nothing is asked. The other arguments have the names and values of the flags.
    Raises UserError for data that does not fit, and for a model or runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.errors import check_type
    from effexport.evaluation.data import Windows
    from effexport.evaluation.evaluate import EvaluatedModel, evaluate_artifact, other_subject
    from effexport.runners.artifact_runner import options_from_flags

    check_texts(runtime=runtime, implementation=implementation, precision_hint=precision_hint)
    check_type("compare", compare, (str, type(None)), "a path, '@' and a runtime, both, or 'torch'")
    for name, number in {"stride": stride, "seed": seed, "device": device}.items():
        check_type(name, number, int, "a number")
    for name, count in {"window": window, "rows": rows}.items():
        check_type(name, count, (int, type(None)), "a number")
    given = data if isinstance(data, Mapping) else path_of("data", data)
    options = options_from_flags(runtime, implementation=implementation, device=device, precision_hint=precision_hint)
    with user_errors():
        subject = EvaluatedModel(open_artifact(path_of("artifact", artifact)), options)
        other = None if compare is None else other_subject(compare, subject, optional_path("weights", weights))
        windows = Windows(window, stride, rows, seed)
        return evaluate_artifact(subject, given, windows, other, lambda stage: progress(stage, None))


@dataclass(frozen=True)
class Description:
    """What a path holds. details: as `effexport inspect --json` prints them, by the kind."""

    kind: Kind
    path: Path
    details: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<Description of the {self.kind} {self.path}: {', '.join(self.details)}>"


def inspect(path: str | Path) -> Description:
    """Describe an artifact folder, an ONNX file, a TensorRT engine or a checkpoint folder, as `effexport inspect` does.

    Raises UserError for a path that holds something else or is damaged.
    """
    from effexport.description import describe

    with user_errors():
        kind, details = describe(path_of("path", path))
    return Description(kind, path_of("path", path), details)


def report(artifact: str | Path) -> Report:
    """The report that an artifact was built with, as `effexport report` reads it; nothing is measured again.

    Raises UserError for a missing or damaged artifact.
    """
    from effexport.artifact import open_artifact
    from effexport.report.reading import report_of_artifact

    return report_of_artifact(open_artifact(path_of("artifact", artifact)))


@overload
def load(path: str | Path, settings: RunOptions | None = None) -> OrtRunner | OpenVinoRunner | TrtRunner: ...


@overload
def load(path: str | Path, *, runtime: str) -> Runner: ...


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
    from effexport.runners.artifact_runner import runner_from_artifact

    options = checked_options(settings, runtime)
    return runner_from_artifact(open_artifact(path_of("path", path)), options)


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
    from effexport.errors import check_type
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.text.task import DEFAULT_OPTIONS, TextOptions
    from effexport.text.tasks import TextModel, task_from_artifact

    run_options = checked_options(settings, runtime)
    check_type("options", options, (TextOptions, type(None)), "an effexport.TextOptions")
    artifact = open_artifact(path_of("path", path))
    task = task_from_artifact(artifact, options or DEFAULT_OPTIONS)
    return TextModel(runner_from_artifact(artifact, run_options), task, artifact.spec.batch)


def load_decoder(path: str | Path, settings: RunOptions | None = None, *, runtime: str | None = None) -> DecodeRunner:
    """Open a causal `linear` or `aft-simple` artifact to read prompts and decode token by token, with a state.

    settings: how to run it; see `effexport.RunOptions`.
    runtime: instead of settings, the name of a runtime alone, as in --runtime: "ort-cuda", or "trt-rtx" for the engines
    of that target, which keep the state on the GPU.
    Raises UserError for an artifact without a decode step, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.runners.artifact_runner import decoder_from_artifact

    options = checked_options(settings, runtime)
    return decoder_from_artifact(open_artifact(path_of("path", path)), options)


def load_generator(path: str | Path, *, runtime: str = DEFAULT_RUNTIME) -> TextGenerator:
    """Open a causal `linear` or `aft-simple` artifact that has logits, to continue texts.

        with effexport.load_generator("artifacts/linear") as generator:
            for piece in generator.stream("Once upon a time", effexport.Sampling(max_new_tokens=100)):
                print(piece, end="", flush=True)

    runtime: as in --runtime. Raises UserError for an artifact that cannot generate, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.generation.text_generator import generator_from_artifact
    from effexport.runners.artifact_runner import decoder_from_artifact

    options = checked_options(None, runtime)
    return generator_from_artifact(open_artifact(path_of("path", path)), lambda it: decoder_from_artifact(it, options))


def path_of(name: str, path: str | Path) -> Path:
    """The argument of this name as a path. Raises UserError for something else."""
    from effexport.errors import UserError, check_type

    check_type(name, path, (str, os.PathLike), "a path, as str or pathlib.Path")
    found = Path(path)
    # the libraries that read and write models take names as UTF-8
    if (encoding := sys.getfilesystemencoding()) != "utf-8" and not str(found.absolute()).isascii():
        raise UserError(
            f"{name} is {str(found)!a}, and in this locale Python has {encoding} for the names of files; start it with "
            "PYTHONUTF8=1, or in a locale with UTF-8"
        )
    return found


def optional_path(name: str, path: str | Path | None) -> Path | None:
    return None if path is None else path_of(name, path)


def check_settings(settings: RunOptions | None) -> None:
    """Raise UserError for settings that are something else."""
    from effexport.errors import UserError, check_type
    from effexport.runners.options import RunOptions

    check_type("settings", settings, (RunOptions, type(None)), "an effexport.RunOptions")
    if settings is not None and settings.runtime not in ARTIFACT_RUNTIMES:
        expected = ", ".join(ARTIFACT_RUNTIMES)
        raise UserError(f"settings.runtime is {settings.runtime!r}, which runs no artifacts; expected: {expected}")


def checked_options(settings: RunOptions | None, runtime: str | None) -> RunOptions:
    """How to run a model, from settings or the name of a runtime.

    Raises UserError if both are given, or one is something else.
    """
    from effexport.errors import UserError
    from effexport.runners.artifact_runner import options_from_flags
    from effexport.runners.options import RunOptions

    check_settings(settings)
    if runtime is None:
        return settings or RunOptions()
    check_texts(runtime=runtime)
    if settings is not None:
        raise UserError(
            "settings and runtime were both given; settings have a runtime of their own, so give one of them"
        )
    return options_from_flags(runtime)


def check_texts(**values: str) -> None:
    """Raise UserError for arguments that must be text and are something else."""
    from effexport.errors import check_type

    for name, value in values.items():
        check_type(name, value, str, "text")
