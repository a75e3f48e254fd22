"""A runner for an artifact, by the name of a runtime."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from effexport.errors import UserError
from effexport.models.validation import did_you_mean
from effexport.runners.ort.session import IMPLEMENTATIONS
from effexport.runners.runner import Runner
from effexport.runtimes import ARTIFACT_RUNTIMES

if TYPE_CHECKING:
    from effexport.artifact import Artifact


def check_runtime(runtime: str, implementation: str) -> None:
    """Raises UserError for an unknown name, or for an implementation with an engine, where it is already decided."""
    for option, value, known in (
        ("--runtime", runtime, tuple(ARTIFACT_RUNTIMES)),
        ("--implementation", implementation, IMPLEMENTATIONS),
    ):
        if value not in known:
            raise UserError(f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
    if ARTIFACT_RUNTIMES[runtime].engine and implementation != "auto":
        raise UserError(
            f"--implementation {implementation} has no meaning with --runtime {runtime}: whether plugins or bodies run "
            "was decided when the engine was built; leave it out"
        )


def runner_from_artifact(
    artifact: Artifact, runtime: str = "ort", implementation: str = "auto", threads: int | None = None
) -> Runner:
    """Open an artifact with a runtime of the table. threads: of ONNX Runtime; None lets it decide.

    Raises UserError for a runtime that is unknown, missing, or has no engine in the artifact.
    """
    check_runtime(runtime, implementation)
    row = ARTIFACT_RUNTIMES[runtime]
    module = importlib.import_module(f"{__package__}.{row.folder}.runner")
    runner: Runner = module.runner_from_artifact(artifact, row, implementation, threads)
    return runner
