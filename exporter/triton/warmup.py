"""Warm-up requests, which an instance answers before it is ready: the golden inputs of the artifact."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from effexport.artifact import Artifact
from effexport.engines.sidecar import EngineInfo
from effexport.proof.cases import load_reference
from effexport.proof.inputs import EXPORT, REFERENCE_SEED_OFFSET, case_inputs
from effexport.runners.joining import rows_of

if TYPE_CHECKING:
    from effexport.dtypes import Array


# Larger batches are not warmed up, because their files would be larger than the model.
LARGEST_BYTES = 64_000_000


@dataclass(frozen=True)
class WarmUp:
    """A warm-up request. files: the file of each input in the model's folder `warmup`, named by its content."""

    inputs: dict[str, Array]

    @property
    def batch(self) -> int:
        return rows_of(self.inputs)

    @property
    def files(self) -> dict[str, str]:
        return {
            name: f"{name}-{'x'.join(map(str, value.shape))}-{hashlib.sha256(value.tobytes()).hexdigest()[:8]}.bin"
            for name, value in self.inputs.items()
        }


def warm_ups(artifact: Artifact, sizes: tuple[int, ...], engine: EngineInfo | None = None) -> tuple[WarmUp, ...]:
    """One request per batch size at the exported length, except those that the engine does not accept.

    sizes: 0 stands for the golden batch as it is.
    """
    golden = golden_inputs(artifact)
    if any(tensor.dims[:1] != ("batch",) for tensor in artifact.spec.inputs):
        sizes = (0,)  # the rows of such a model are not samples
    found = []
    for size in sizes:
        count = rows_of(golden)
        if size and size * sum(value[:1].nbytes for value in golden.values()) > LARGEST_BYTES:
            continue
        rows = np.arange(size) % count
        inputs = {n: np.asarray(value[rows] if size else value, order="C") for n, value in golden.items()}
        if engine is None or any(accepts(profile, inputs) for profile in engine.profiles):
            found.append(WarmUp(inputs))
    return tuple(found)


def golden_inputs(artifact: Artifact) -> Mapping[str, Array]:
    """The inputs of the case that has the shape of the export; drawn again if the golden file does not hold them."""
    stored = load_reference(artifact.reference_path) if artifact.has_golden else []
    found = next((case.inputs for case in stored if case.name == EXPORT), None)
    return found or case_inputs(artifact.spec, artifact.spec.seed + REFERENCE_SEED_OFFSET)[EXPORT]


def accepts(profile: Mapping[str, Sequence[Sequence[int]]], inputs: dict[str, Array]) -> bool:
    """Whether every input is between the smallest and the largest shape of a profile."""
    return all(
        low <= size <= high
        for name, value in inputs.items()
        for low, size, high in zip(profile[name][0], value.shape, profile[name][2], strict=True)
    )
