"""The PyTorch module of an artifact, made again, and a check of the weights that the user names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.errors import Unavailable
from effexport.export.module_source import SEED, ModuleSource, source_from_path, weights_digest
from effexport.proof.check import ALL_CASES, Check, Kind
from effexport.runtimes import TORCH

if TYPE_CHECKING:
    from torch import nn

# What the user says that an artifact was built from: a checkpoint folder, a file of weights, or a module of their own.
Weights = Path | ModuleSource
OTHER_DRAW = "this PyTorch draws other weights from the seed than the one that built the artifact"


def source_of(weights: Weights | None) -> ModuleSource:
    """The source of the module: the seed if the user names nothing."""
    return weights if isinstance(weights, ModuleSource) else source_from_path(weights)


def why_not_rebuilt(artifact: Artifact, weights: Weights | None) -> str:
    """The reason why an artifact's PyTorch module cannot be made again here, as far as known without trying; or ""."""
    origin = artifact.manifest.weights_from
    if artifact.spec.model.recipe == "code" and not isinstance(weights, ModuleSource):
        return f"the module came from {origin}, code that an artifact does not hold: name it with verify --module"
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch is not installed; add it with: {TORCH.remedy}"
    if origin != SEED and weights is None:
        return f"the weights came from {origin}: name it with --weights to compare with PyTorch on new inputs"
    return ""


def module_of_artifact(artifact: Artifact, weights: Weights | None) -> nn.Module | Unavailable:
    """The PyTorch module of an artifact, float32 and in evaluation mode, if it can be made again.

    weights: their source; None if they were drawn from the seed.
    Raises SpecError for weights that do not fit.
    """
    reason = why_not_rebuilt(artifact, weights)
    if reason:
        return Unavailable(reason)
    module = source_of(weights).make(artifact.spec)
    # weights that were named are judged by `check_weights`
    if weights is None and weights_digest(module) != artifact.manifest.weights_sha256:
        return Unavailable(OTHER_DRAW)
    return module


def check_weights(artifact: Artifact, weights: Weights) -> Check:
    """A check that the weights that the user names are those of the artifact, bit by bit.

    Raises SpecError for weights that do not fit, and UserError for a file that is missing or damaged.
    """
    digest, expected = weights_digest(source_of(weights).make(artifact.spec)), artifact.manifest.weights_sha256
    metric, origin = "checksum", artifact.manifest.weights_from
    if digest == expected:
        return Check(Kind.WEIGHTS, ALL_CASES, metric, "passed")
    built_from = f"drawn from seed {artifact.spec.seed}" if origin == SEED else f"those of {origin}"
    named = weights.origin if isinstance(weights, ModuleSource) else weights
    detail = f"{named} holds other weights than the artifact was built with, which were {built_from}"
    if isinstance(weights, ModuleSource):
        detail += f": their sha256 is {digest[:12]}…, not {expected[:12]}…"
    return Check(Kind.WEIGHTS, ALL_CASES, metric, "failed", detail=detail)
