"""The fast part of the attack on a server. scripts/soak.sh runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign import requests

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]


def test_malformed_requests_are_refused_beside_right_answers(tmp_path: Path) -> None:
    tally = requests.run(80, 0, tmp_path)
    assert tally.problems == []
    assert tally.cases == 80
    assert {outcome.split()[-1] for outcome in tally.outcomes} >= {"400", "401", "404"}
