"""A runner for an artifact, by the name of a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.engines.api import PRODUCTS
from effexport.errors import UserError
from effexport.models.validation import did_you_mean
from effexport.runners import Runner, limits_from_spec
from effexport.runners.ort.session import IMPLEMENTATIONS, OrtSettings
from effexport.runners.ort.session import RUNTIMES as ORT_RUNTIMES

if TYPE_CHECKING:
    from effexport.artifact import Artifact

# The names of --runtime: ONNX Runtime with one of its providers, or an engine of the artifact.
RUNTIMES = (*ORT_RUNTIMES, *PRODUCTS)


def check_runtime(runtime: str, implementation: str) -> None:
    """Raises UserError for a name that is unknown, or an implementation that an engine cannot choose any more."""
    for option, value, known in (
        ("--runtime", runtime, RUNTIMES),
        ("--implementation", implementation, IMPLEMENTATIONS),
    ):
        if value not in known:
            raise UserError(f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
    if runtime in PRODUCTS and implementation != "auto":
        raise UserError(
            f"--implementation {implementation} has no meaning with --runtime {runtime}: whether plugins or bodies run "
            "was decided when the engine was built; leave it out"
        )


def runner_from_artifact(
    artifact: Artifact, runtime: str = "ort", implementation: str = "auto", threads: int | None = None
) -> Runner:
    """threads: of ONNX Runtime; None lets it decide.

    Raises UserError for a runtime that is unknown, missing, or has no engine in the artifact.
    """
    check_runtime(runtime, implementation)
    limits = limits_from_spec(artifact.spec)
    if runtime in PRODUCTS:
        from effexport.engines.engine_from_onnx import model_digest
        from effexport.runners.trt.runner import TrtRunner

        engine = artifact.engine_path(runtime)
        return TrtRunner(engine, limits=limits, onnx_sha256=model_digest(artifact.model_path))
    from effexport.runners.ort.runner import OrtRunner

    settings = OrtSettings(provider=ORT_RUNTIMES[runtime], implementation=implementation, threads=threads)
    return OrtRunner(artifact.model_path, settings, limits=limits)
