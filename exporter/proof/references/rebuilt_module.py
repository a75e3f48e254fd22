"""The PyTorch module of an artifact, made again from the seed or from the weights that it was built with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.errors import Unavailable
from effexport.export.module_source import SEED, source_from_path, weights_digest
from effexport.models.module_spec import ModuleSpec

if TYPE_CHECKING:
    from torch import nn

OTHER_DRAW = "this PyTorch draws other weights from the seed than the one that built the artifact"


def module_of_artifact(artifact: Artifact, weights: Path | None) -> nn.Module | Unavailable:
    """The PyTorch module of an artifact, float32 and in evaluation mode, if it can be made again.

    weights: where they came from, a checkpoint folder or a file; None where they were drawn from the seed.
    Raises SpecError for weights that do not fit.
    """
    spec = artifact.spec
    origin = artifact.manifest.weights_from
    if isinstance(spec.model, ModuleSpec):
        return Unavailable(
            f"the module came from {origin}, code that an artifact does not hold: build again to compare"
        )
    if origin != SEED and weights is None:
        return Unavailable(
            f"the weights came from {origin}: name it with --weights to compare with PyTorch on new inputs"
        )
    module = source_from_path(weights).make(spec)
    if weights_digest(module) != artifact.manifest.weights_sha256:
        return Unavailable("these are not the weights that the artifact was built with" if weights else OTHER_DRAW)
    return module
