"""effexport: efficient-attention models from PyTorch to ONNX and TensorRT, with proof that they compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, overload

from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.runners.ort.decode import DecodeRunner
    from effexport.runners.ort.runner import OrtRunner
    from effexport.runners.ort.settings import OrtSettings
    from effexport.runners.runner import Runner

__all__ = ["OrtSettings", "__version__", "load", "load_decoder"]


def __getattr__(name: str) -> type[OrtSettings]:
    """Import OrtSettings on first use, so that `import effexport` stays quick."""
    if name != "OrtSettings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from effexport.runners.ort.settings import OrtSettings

    return OrtSettings


@overload
def load(path: str | Path, settings: OrtSettings | None = None) -> OrtRunner: ...


@overload
def load(path: str | Path, *, runtime: str) -> Runner: ...


def load(path: str | Path, settings: OrtSettings | None = None, *, runtime: str | None = None) -> Runner:
    """Open an artifact folder in a runner, after checking every file against the manifest.

    Use it as a context manager or call `close`; `run` is thread-safe:

        with effexport.load("artifacts/lsh") as runner:
            outputs = runner.run({"input_ids": ids, "attention_mask": mask})

    settings: how ONNX Runtime runs the model; see `effexport.OrtSettings`.
    runtime: instead of settings, the name of a runtime as in --runtime: "ort-cuda", or "trt-rtx" for the engine of that
    target.
    Raises effexport.errors.UserError for a missing or damaged artifact, or a runtime that is not available.
    """
    from effexport.artifact import open_artifact
    from effexport.errors import UserError
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.runners.feeds import limits_from_spec
    from effexport.runners.ort.runner import OrtRunner

    artifact = open_artifact(Path(path))
    if runtime is not None:
        if settings is not None:
            raise UserError("settings and runtime were both given; settings are for ONNX Runtime, so give one of them")
        return runner_from_artifact(artifact, runtime)
    return OrtRunner(artifact.model_path, settings, limits=limits_from_spec(artifact.spec))


def load_decoder(path: str | Path, settings: OrtSettings | None = None) -> DecodeRunner:
    """Open a causal `linear` or `aft-simple` artifact to read prompts and decode token by token, with a state.

    settings: how ONNX Runtime runs it; see `effexport.OrtSettings`.
    Raises effexport.errors.UserError for an artifact without a decode step.
    """
    from effexport.artifact import open_artifact
    from effexport.errors import UserError
    from effexport.runners.feeds import limits_from_spec
    from effexport.runners.ort.decode import DecodeRunner

    artifact = open_artifact(Path(path))
    if not artifact.spec.model.has_decode_step:
        raise UserError(f"{path} has no decode step; only causal linear and aft-simple models have one")
    limits = limits_from_spec(artifact.spec)
    return DecodeRunner(artifact.decode_step_path, artifact.prefill_path, limits, settings)
