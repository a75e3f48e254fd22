"""Shared fixtures of the generation tests: small artifacts that generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from effexport.artifact import Artifact
from effexport.runners.artifact_runner import decoder_from_artifact
from effexport.tasks.text_generator import TextGenerator, generator_from_artifact


@pytest.fixture(scope="module", params=["linear", pytest.param("aft-simple", marks=pytest.mark.soak)])
def artifact(request: pytest.FixtureRequest, built: Callable[..., Artifact]) -> Artifact:
    """Byte-level encoders of 64 positions."""
    return built(request.param, causal=True, lm_head=True)


@pytest.fixture
def generator(artifact: Artifact) -> Iterator[TextGenerator]:
    with generator_from_artifact(artifact, decoder_from_artifact) as generator:
        yield generator
