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
    """Imported when asked for, so that `import effexport` stays quick."""
    if name != "OrtSettings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from effexport.runners.ort.settings import OrtSettings

    return OrtSettings


@overload
def load(path: str | Path, settings: OrtSettings | None = None) -> OrtRunner: ...


@overload
def load(path: str | Path, *, runtime: str) -> Runner: ...


def load(path: str | Path, settings: OrtSettings | None = None, *, runtime: str | None = None) -> Runner:
    """A runner for an artifact folder, with every file checked against the manifest first.

    Use it as a context manager or call `close`; `run` is thread-safe:

        with effexport.load("artifacts/lsh") as runner:
            outputs = runner.run({"input_ids": ids, "attention_mask": mask})

    settings: ONNX Runtime's provider, threads, kernels or function bodies; see `effexport.OrtSettings`.
    runtime: instead of settings, the name of a runtime as in --runtime: "ort", "ort-cuda", or "trt" or "trt-rtx" for an
    engine of the artifact.
    Raises effexport.errors.UserError for a missing or damaged artifact, or a missing runtime.
    """
    from effexport.artifact import open_artifact
    from effexport.errors import UserError
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.runners.feeds import limits_from_spec
    from effexport.runners.ort.runner import OrtRunner

    artifact = open_artifact(Path(path))
    if runtime is not None:
        if settings is not None:
            raise UserError("give either settings, which are ONNX Runtime's, or runtime; both were given")
        return runner_from_artifact(artifact, runtime)
    return OrtRunner(artifact.model_path, settings, limits=limits_from_spec(artifact.spec))


def load_decoder(path: str | Path) -> DecodeRunner:
    """Token by token: the decode step of a causal `linear` or `aft-simple` artifact, with the state carried along.

    Raises effexport.errors.UserError for an artifact that has none.
    """
    from effexport.artifact import open_artifact
    from effexport.errors import UserError
    from effexport.runners.feeds import limits_from_spec
    from effexport.runners.ort.decode import DecodeRunner

    artifact = open_artifact(Path(path))
    if not artifact.spec.has_decode_step:
        raise UserError(f"{path} has no decode step; only causal linear and aft-simple models have one")
    return DecodeRunner(artifact.decode_step_path, limits=limits_from_spec(artifact.spec))
