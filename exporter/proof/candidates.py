"""Models under test: a runner and, if the model hashes or rounds, a second one that reads its decisions as inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from effexport.export.onnx_graph import graph_outline
from effexport.proof.given_values import GIVEN_SUFFIX, given_values, with_given_values
from effexport.runners.artifact_runner import OpenModel
from effexport.runners.feeds import FeedLimits
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import Runner

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.checks.candidate import RunWithGiven


class RunnerCandidate:
    """A runner under test; if the model hashes or rounds, `given` runs the same model with its decisions as inputs.

    values: the values of the graph that are prescribed, by their names in the reference; empty if there are none.
    """

    def __init__(
        self, runner: Runner, given: Runner | None = None, values: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._runner = runner
        self._given = given
        self._values = dict(values)
        self.implementation = dict(runner.implementation)

    def accepts(self, inputs: Mapping[str, Array]) -> bool:
        return True

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._runner.run(inputs)

    @property
    def given(self) -> Collection[str]:
        return self._values if self._given is not None else ()

    @property
    def run_with_given(self) -> RunWithGiven | None:
        return self._run_with_given if self._given is not None else None

    def _run_with_given(
        self, inputs: Mapping[str, Array], given: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        assert self._given is not None
        feeds = dict(inputs)
        for name, value in self._values.items():
            feeds[value + GIVEN_SUFFIX] = np.ascontiguousarray(given[name])
        results = self._given.run(feeds)
        own = {name: results.pop(value) for name, value in self._values.items()}
        return results, own


class ModelCandidate(RunnerCandidate):
    """A model file in a runtime; if it hashes or rounds, it is opened a second time with its decisions as inputs."""

    def __init__(self, path: Path, decisions: Sequence[str], limits: FeedLimits, open_model: OpenModel) -> None:
        graph_outline(path)
        runner = open_model(path, limits, None)
        super().__init__(runner, *opened_with_given(path, decisions, limits, open_model))


def opened_with_given(
    path: Path, decisions: Sequence[str], limits: FeedLimits, open_model: OpenModel
) -> tuple[Runner | None, dict[str, str]]:
    """The runner of a model file that reads its decisions as inputs, None if it has none; and their names in the model
    by those in the reference."""
    values = given_values(path, decisions)
    given = None
    if values:
        given = open_model(with_given_values(path, list(values.values())), limits, path.parent.resolve())
    return given, values


def open_in_ort(settings: RunOptions | None) -> OpenModel:
    """What opens a model file, or a serialised model, in ONNX Runtime."""

    def open_model(model: Path | bytes, limits: FeedLimits, external_folder: Path | None) -> OrtRunner:
        return OrtRunner(model, settings, limits=limits, external_folder=external_folder)

    return open_model
