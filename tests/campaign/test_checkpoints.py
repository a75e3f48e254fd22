"""The fast part of the attack with checkpoints and spec files. scripts/soak.sh runs all of it."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import checkpoints

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")


@pytest.fixture
def kept_limit() -> Iterator[None]:
    """The campaign limits the memory of its process."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_limit")
def test_mutated_checkpoints_are_refused_in_one_line_or_are_read_right(tmp_path: Path) -> None:
    checkpoints.make_checkpoints(tmp_path / "healthy")
    # in this process, which has loaded PyTorch; without the builds that go on to their end
    case = checkpoints.attacker(tmp_path, 0, 0)
    found = Counter(case(index) for index in range(60) if index % checkpoints.FULL_BUILDS)
    assert found.total() == 57
    assert {"checkpoint refused", "checkpoint accepted", "spec refused"} <= found.keys()
