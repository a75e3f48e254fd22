"""Models under test: a runner and, if the model hashes, a second one that reads the buckets as inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.export.onnx_graph import load_graph
from effexport.proof.bucket_injection import GIVEN_SUFFIX, hash_values, with_given_buckets
from effexport.runners.artifact_runner import OpenModel
from effexport.runners.feeds import FeedLimits
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import Runner

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.checks.candidate import RunWithBuckets


class RunnerCandidate:
    """A runner under test; if the model hashes, `given` runs the same model with the buckets as inputs.

    hashes: names of the bucket values in the reference, in the order of the layers; values: their names in the model.
    Both are empty for models that do not hash.
    """

    def __init__(
        self, runner: Runner, given: Runner | None = None, hashes: Sequence[str] = (), values: Sequence[str] = ()
    ) -> None:
        self._runner = runner
        self._given = given
        self._hashes = tuple(hashes)
        self._values = tuple(values)
        self.implementation = dict(runner.implementation)

    def accepts(self, inputs: Mapping[str, Array]) -> bool:
        return True

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._runner.run(inputs)

    @property
    def run_with_buckets(self) -> RunWithBuckets | None:
        return self._run_with_buckets if self._given is not None else None

    def _run_with_buckets(
        self, inputs: Mapping[str, Array], buckets: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        assert self._given is not None
        feeds = dict(inputs)
        for name, value in zip(self._hashes, self._values, strict=True):
            feeds[value + GIVEN_SUFFIX] = np.ascontiguousarray(buckets[name])
        results = self._given.run(feeds)
        own = {name: results.pop(value) for name, value in zip(self._hashes, self._values, strict=True)}
        return results, own


class ModelCandidate(RunnerCandidate):
    """A model file in a runtime; if the model hashes, it is opened a second time with the buckets as inputs."""

    def __init__(self, path: Path, hashes: Sequence[str], limits: FeedLimits, open_model: OpenModel) -> None:
        load_graph(path)
        runner = open_model(path, limits, None)
        super().__init__(runner, *opened_with_buckets(path, hashes, limits, open_model))


def opened_with_buckets(
    path: Path, hashes: Sequence[str], limits: FeedLimits, open_model: OpenModel
) -> tuple[Runner | None, Sequence[str], Sequence[str]]:
    """The runner of a model file that reads its buckets as inputs, None if it does not hash; `hashes`; and their names
    in the model."""
    values = hash_values(path, hashes)
    given = open_model(with_given_buckets(path, values), limits, path.parent.resolve()) if values else None
    return given, hashes, values


def open_in_ort(settings: OrtSettings | None) -> OpenModel:
    """What opens a model file, or a serialised model, in ONNX Runtime."""

    def open_model(model: Path | bytes, limits: FeedLimits, external_folder: Path | None) -> OrtRunner:
        return OrtRunner(model, settings, limits=limits, external_folder=external_folder)

    return open_model
