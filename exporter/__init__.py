"""effexport: efficient-attention models from PyTorch to ONNX and TensorRT, with proof that they compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.runners.decode import DecodeRunner
    from effexport.runners.ort import OrtRunner
    from effexport.runners.ort_session import OrtSettings

__version__ = "0.1.0"
__all__ = ["OrtSettings", "__version__", "load", "load_decoder"]


def __getattr__(name: str) -> type[OrtSettings]:
    """Imported when asked for, so that `import effexport` stays quick."""
    if name != "OrtSettings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from effexport.runners.ort_session import OrtSettings

    return OrtSettings


def load(path: str | Path, settings: OrtSettings | None = None) -> OrtRunner:
    """A runner for an artifact folder, with every file checked against the manifest first.

    Use it as a context manager or call `close`; `run` is thread-safe:

        with effexport.load("artifacts/lsh") as runner:
            outputs = runner.run({"input_ids": ids, "attention_mask": mask})

    settings: provider, threads, kernels or function bodies; see `effexport.OrtSettings`.
    Raises effexport.errors.UserError for a missing or damaged artifact, or a missing runtime.
    """
    from effexport.artifact import open_artifact
    from effexport.runners import limits_from_spec
    from effexport.runners.ort import OrtRunner

    artifact = open_artifact(Path(path))
    return OrtRunner(artifact.model_path, settings, limits=limits_from_spec(artifact.spec))


def load_decoder(path: str | Path) -> DecodeRunner:
    """Token by token: the decode step of a causal `linear` or `aft-simple` artifact, with the state carried along.

    Raises effexport.errors.UserError for an artifact that has none.
    """
    from effexport.artifact import open_artifact
    from effexport.errors import UserError
    from effexport.runners import limits_from_spec
    from effexport.runners.decode import DecodeRunner

    artifact = open_artifact(Path(path))
    if not artifact.spec.has_decode_step:
        raise UserError(f"{path} has no decode step; only causal linear and aft-simple models have one")
    return DecodeRunner(artifact.decode_step_path, limits=limits_from_spec(artifact.spec))
