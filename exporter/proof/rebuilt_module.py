"""The PyTorch module of an artifact, made again, and a check of the weights that the user names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.base.environment import require_torch
from effexport.base.errors import Unavailable, UserError
from effexport.base.runtimes import TORCH
from effexport.export.module_source import model_from_source, weights_digest
from effexport.models.sources import SEED, ModelSource, source_from_path, source_from_seed
from effexport.proof.check import ALL_CASES, Check, Kind

if TYPE_CHECKING:
    from effexport.models.user.model import UserModel

OTHER_DRAW = "this PyTorch draws other weights from the seed than the one that built the artifact"


def source_of_weights(artifact: Artifact, weights: Path | None) -> ModelSource | None:
    """The checkpoint folder or file that the user says an artifact was built from; None without one.

    Raises UserError for an artifact whose module must be named, and without PyTorch.
    """
    if weights is None:
        return None
    if why := artifact.spec.model.why_not_alone:
        raise UserError(
            f"--weights {weights} does not apply to {artifact.path} alone: its weights came from "
            f"{artifact.manifest.weights_from}, {why}; name it with --module"
        )
    require_torch("--weights")
    return source_from_path(artifact.spec.model, weights)


def why_not_rebuilt(artifact: Artifact, source: ModelSource | None) -> str:
    """The reason why an artifact's PyTorch module cannot be made again here, as far as known without trying; or ""."""
    origin = artifact.manifest.weights_from
    if source is None and (why := artifact.spec.model.why_not_alone):
        return f"the module came from {origin}, {why}: name it with verify --module"
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch is not installed; add it with: {TORCH.remedy}"
    if origin != SEED and source is None:
        return f"the weights came from {origin}: name it with --weights to compare with PyTorch on new inputs"
    return ""


def model_of_artifact(artifact: Artifact, source: ModelSource | None) -> UserModel | Unavailable:
    """The PyTorch module of an artifact, float32 and in evaluation mode, if it can be made again.

    source: where its weights came from; None where they were drawn from the seed.
    Raises SpecError for weights that do not fit.
    """
    reason = why_not_rebuilt(artifact, source)
    if reason:
        return Unavailable(reason)
    model = model_from_source(source or source_from_seed(artifact.spec.model), artifact.spec)
    # weights that were named are judged by `check_weights`
    if source is None and weights_digest(model.module) != artifact.manifest.weights_sha256:
        return Unavailable(OTHER_DRAW)
    return model


def check_weights(artifact: Artifact, source: ModelSource) -> Check:
    """A check that the weights that the user names are those of the artifact, bit by bit.

    Raises SpecError for weights that do not fit, and UserError for a file that is missing or damaged.
    """
    digest = weights_digest(model_from_source(source, artifact.spec).module)
    expected, origin = artifact.manifest.weights_sha256, artifact.manifest.weights_from
    if digest == expected:
        return Check(Kind.WEIGHTS, ALL_CASES, "checksum", "passed")
    built_from = f"drawn from seed {artifact.spec.seed}" if origin == SEED else f"those of {origin}"
    named = source.path or source.origin
    detail = f"{named} holds other weights than the artifact was built with, which were {built_from}"
    if source.is_original:
        detail += f": their sha256 is {digest[:12]}…, not {expected[:12]}…"
    return Check(Kind.WEIGHTS, ALL_CASES, "checksum", "failed", detail=detail)
