"""Opens the decode step and the prefill of artifacts with the runtime of a given name."""

from __future__ import annotations

from effexport.artifact import DECODE_STEP, PREFILL, Artifact
from effexport.errors import UserError
from effexport.runners.artifact_runner import DEFAULT_OPTIONS, check_runtime
from effexport.runners.decode import DecodeRunner
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.decode import decoder_in_ort
from effexport.runners.ort.runner import settings_from_options
from effexport.runners.runner import ModelOptions
from effexport.runners.trt.decode import decoder_in_trt
from effexport.runtimes import ARTIFACT_RUNTIMES


def decoder_from_artifact(
    artifact: Artifact, runtime: str = "ort", options: ModelOptions = DEFAULT_OPTIONS
) -> DecodeRunner:
    """Open the decode step and the prefill of an artifact, or the engines of them.

    Raises UserError for a runtime that is unknown, missing, or does not decode, and for an artifact without a decode
    step or its engines.
    """
    check_runtime(runtime, options)
    check_has_decode_step(artifact)
    limits, row = limits_from_spec(artifact.spec), ARTIFACT_RUNTIMES[runtime]
    if row.engine:
        for model in (DECODE_STEP, PREFILL):
            artifact.engine_path(runtime, model)
        return decoder_in_trt(artifact.path, runtime, limits)
    if row.folder != "ort":
        able = [name for name, other in ARTIFACT_RUNTIMES.items() if other.engine or other.folder == "ort"]
        raise UserError(f"--runtime {runtime} does not decode token by token; expected one of: {', '.join(able)}")
    settings = settings_from_options(row, options)
    return decoder_in_ort(artifact.decode_step_path, artifact.prefill_path, limits, settings)


def check_has_decode_step(artifact: Artifact) -> None:
    """Raises UserError for an artifact that cannot decode token by token."""
    if not artifact.spec.has_decode_step:
        raise UserError(f"{artifact.path} has no decode step; only causal linear and aft-simple models have one")
