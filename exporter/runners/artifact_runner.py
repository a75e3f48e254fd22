"""Opens artifacts, their decode steps, ONNX files and engines with the runtime of a given name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.base.errors import UserError, check_type
from effexport.base.formatting import listed
from effexport.base.runtimes import ARTIFACT_RUNTIMES, Runtime
from effexport.export.onnx_graph import model_digest
from effexport.models.validation import did_you_mean
from effexport.models.variants import WITH_STATE
from effexport.plugins.ops import OPS
from effexport.runners.decode import DecodeRunner, EncoderDecoderRunner
from effexport.runners.options import RunOptions
from effexport.runners.ort.kernels import check_operators
from effexport.runners.runner import FeedLimits, Runner, limits_from_spec, limits_of_runner

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.base.spec import BuildSpec


def options_from_flags(
    runtime: str,
    *,
    implementation: str = "auto",
    device: int = 0,
    precision_hint: str = "",
    threads: int | None = None,
    memory_arena: bool = True,
) -> RunOptions:
    """The options that users have chosen by flags, which the errors name.

    Raises UserError for an unknown runtime, and for options that it does not have.
    """
    if runtime not in ARTIFACT_RUNTIMES:
        known = tuple(ARTIFACT_RUNTIMES)
        raise UserError(f"unknown --runtime {runtime!r}{did_you_mean(runtime, known)} Expected: {', '.join(known)}")
    check_operators(implementation, "--implementation")
    row = ARTIFACT_RUNTIMES[runtime]
    if not row.in_ort and implementation != "auto":
        reason = (
            "whether plugins or bodies run was decided when the engine was built" if row.engine else "it runs bodies"
        )
        raise UserError(
            f"--implementation {implementation} does not apply to --runtime {runtime}: {reason}; leave it out"
        )
    check_device(row, device)
    check_precision_hint(row, precision_hint)
    return RunOptions(
        runtime=runtime,
        implementation=implementation,
        device=device,
        precision_hint=precision_hint,
        threads=threads,
        memory_arena=memory_arena,
    )


def check_device(runtime: Runtime, device: int) -> None:
    """Raises UserError for a GPU that the runtime cannot be told to use."""
    if device < 0:
        raise UserError(f"--device is {device}; expected 0 for the first GPU, 1 for the second, …")
    if device == 0 or "device" in runtime.takes:
        return
    remedy = "leave it out" if runtime.device == "cpu" else f"set CUDA_VISIBLE_DEVICES={device} instead"
    where = "on the CPU" if runtime.device == "cpu" else "on the first GPU that it sees"
    raise UserError(f"--device {device} does not apply to --runtime {runtime.name}, which runs {where}; {remedy}")


def check_precision_hint(runtime: Runtime, hint: str) -> None:
    """Raises UserError for a precision that the runtime cannot be asked for."""
    if not hint or hint in runtime.precision_hints:
        return
    if runtime.precision_hints:
        raise UserError(f"unknown --precision-hint {hint!r}; expected: {', '.join(runtime.precision_hints)}")
    able = ", ".join(name for name, row in ARTIFACT_RUNTIMES.items() if row.precision_hints)
    raise UserError(
        f"--precision-hint {hint} does not apply to --runtime {runtime.name}, which computes in the precision of the "
        f"model; expected --runtime {able}, or leave it out"
    )


def check_precision_of_model(spec: BuildSpec, options: RunOptions) -> None:
    """Raises UserError for a hint of less than float32, and a quantised model or one with a part that needs float32.

    OpenVINO can mark operators to be kept in float32, but its fusions lose the mark: with all operators of a Nyström
    layer marked, 13 of 29 matrix products still ran in bfloat16 (2026.4.1).
    """
    if options.precision_hint and spec.is_quantized:
        raise UserError(
            f"--precision-hint {options.precision_hint} does not apply to {spec.precision}, whose roundings are proven "
            "beside float32; leave it out, or build the model with --precision fp32"
        )
    for op in spec.model.custom_ops(spec.fused):  # also those that are inlined
        if options.precision_hint and op in OPS and OPS[op].around_in_float32:
            raise UserError(
                f"--precision-hint {options.precision_hint} does not apply to {spec.attention.variant}: "
                f"{OPS[op].around_in_float32}, and the runtime cannot keep a part of the model in float32; leave it out"
            )


# Takes the path of an ONNX file, or the serialised model; limits of its inputs; and the folder of its external data.
OpenModel = Callable[[Path | bytes, FeedLimits, Path | None], Runner]
# Takes options, the path of an engine, limits of its inputs, and the digest of the model that it should be built from.
OpenEngine = Callable[[RunOptions, Path, FeedLimits, str], Runner]
OpenDecoder = Callable[[RunOptions, Artifact, FeedLimits], DecodeRunner]
DEFAULT_OPTIONS = RunOptions()


def model_opener(options: RunOptions) -> OpenModel:
    """A function that opens ONNX files with a runtime that reads them."""
    opener: OpenModel = partial(runner_module(options.row).open_model, options)
    return opener


def runner_from_artifact(artifact: Artifact, options: RunOptions = DEFAULT_OPTIONS) -> Runner:
    """Open the model of an artifact, or its engine for a runtime that runs engines.

    Raises UserError for a runtime that is missing, or has no engine in the artifact.
    """
    check_precision_of_model(artifact.spec, options)
    limits = limits_of_runner(artifact.spec)
    if options.row.engine:
        open_engine: OpenEngine = runner_module(options.row).open_engine
        return open_engine(options, artifact.engine_path(options.runtime), limits, model_digest(artifact.model_path))
    return model_opener(options)(artifact.model_path, limits, None)


def runner_module(runtime: Runtime) -> ModuleType:
    """The module `runner` of a runtime's folder: it has `open_model` or `open_engine`, and `open_decoder`."""
    return importlib.import_module(f"effexport.{runtime.folder.replace('/', '.')}.runner")


def decoder_from_artifact(artifact: Artifact, options: RunOptions = DEFAULT_OPTIONS) -> DecodeRunner:
    """Open the decode step and the prefill of an artifact, or the engines of them.

    Raises UserError for a runtime that is missing or does not decode, and for an artifact without a decode step or its
    engines.
    """
    check_has_decode_step(artifact)
    if not options.row.decodes:
        able = [name for name, other in ARTIFACT_RUNTIMES.items() if other.decodes]
        raise UserError(
            f"--runtime {options.runtime} does not decode token by token; expected one of: {', '.join(able)}"
        )
    open_decoder: OpenDecoder = runner_module(options.row).open_decoder
    return open_decoder(options, artifact, limits_from_spec(artifact.spec))


def encoder_decoder_from_artifact(artifact: Artifact, options: RunOptions = DEFAULT_OPTIONS) -> EncoderDecoderRunner:
    """Open the encoder and the decode step of an encoder-decoder.

    Raises UserError for another artifact, and for a runtime that is missing or does not run them.
    """
    if artifact.spec.model.decoder is None:
        raise UserError(
            f"{artifact.path} is {artifact.spec.model.title}, not an encoder-decoder; run it with effexport.load"
        )
    if not options.row.grows_caches:
        able = [name for name, other in ARTIFACT_RUNTIMES.items() if other.grows_caches]
        raise UserError(
            f"--runtime {options.runtime} does not run the decode steps of encoder-decoders; expected one of: "
            f"{', '.join(able)}"
        )
    check_precision_of_model(artifact.spec, options)
    spec, open_model = artifact.spec, model_opener(options)
    (_, memory), (_, answer) = spec.source_tensors, spec.step_tensors
    graphs = ((artifact.encoder_path, memory), (artifact.decode_step_path, answer))
    encoder, step = (open_model(path, FeedLimits(outputs=outputs), None) for path, outputs in graphs)
    return EncoderDecoderRunner(spec, encoder, step)


def check_has_decode_step(artifact: Artifact) -> None:
    """Raises UserError for an artifact that cannot decode token by token."""
    if not artifact.spec.has_decode_step:
        remedy = f"; only causal models of {listed(WITH_STATE)} have one"
        if artifact.spec.model.decoder is not None:
            remedy = " without a source: it is an encoder-decoder; open it with effexport.load_encoder_decoder"
        raise UserError(f"{artifact.path} has no decode step{remedy}")


def checked_options(settings: RunOptions | None, runtime: str | None) -> RunOptions:
    """The options of a run, from settings or the name of a runtime.

    Raises UserError if both are given, or one is something else.
    """
    check_type("settings", settings, (RunOptions, type(None)), "an effexport.RunOptions")
    if settings is not None and settings.runtime not in ARTIFACT_RUNTIMES:
        expected = ", ".join(ARTIFACT_RUNTIMES)
        raise UserError(f"settings.runtime is {settings.runtime!r}, which runs no artifacts; expected: {expected}")
    if runtime is None:
        return settings or RunOptions()
    check_type("runtime", runtime, str, "text")
    if settings is not None:
        raise UserError(
            "settings and runtime were both given; settings have a runtime of their own, so give one of them"
        )
    return options_from_flags(runtime)
