"""Shared fixtures of the serving tests: an artifact served in its own process, and a client of the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving_load import Sample, ServerProcess, running_server, samples_of

from effexport.artifact import Artifact


@pytest.fixture(scope="module")
def artifact(built: Callable[..., Artifact]) -> Artifact:
    """A small encoder of at most 64 tokens, whose samples do not depend on each other."""
    return built("linear")


@pytest.fixture(scope="module")
def server(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(artifact.path, tmp_path_factory.mktemp("server"), "--name", "small") as running:
        yield running


@pytest.fixture(scope="module")
def expected(artifact: Artifact) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """feeds → what the runner itself answers."""
    import effexport

    with effexport.load(artifact.path) as runner:
        yield runner.run


@pytest.fixture(scope="module")
def samples(expected: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Sample]:
    """Of three lengths."""
    return samples_of(expected, (16, 40, 64))


@pytest.fixture(scope="module")
def long_artifact(built: Callable[..., Artifact]) -> Artifact:
    """As `artifact`, for 4096 tokens: its runs take far longer than requests do, as those of real models."""
    return built("linear", seq_len=4096)


@pytest.fixture(scope="module")
def long_samples(long_artifact: Artifact) -> list[Sample]:
    import effexport

    with effexport.load(long_artifact.path) as runner:
        return samples_of(runner.run, (4096,))
