"""effexport: efficient-attention models from PyTorch to ONNX and TensorRT, with proof that they compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.runners import Runner

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | Path) -> Runner:
    """A runner for an artifact folder, with every file checked against the manifest first.

    Use it as a context manager or call `close`; `run` is thread-safe:

        with effexport.load("artifacts/lsh") as runner:
            outputs = runner.run({"input_ids": ids, "attention_mask": mask})

    Raises effexport.errors.UserError for a missing or damaged artifact, or a missing runtime.
    """
    from effexport.artifact import open_artifact
    from effexport.runners import limits_from_spec
    from effexport.runners.ort import OrtRunner

    artifact = open_artifact(Path(path))
    return OrtRunner(artifact.model_path, limits=limits_from_spec(artifact.spec))
