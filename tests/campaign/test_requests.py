"""The fast part of the attack on a server. scripts/soak.sh runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign import requests
from serving_load import Reply

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]


def test_malformed_requests_are_refused_beside_right_answers(tmp_path: Path) -> None:
    tally = requests.run(80, 0, tmp_path)
    assert tally.problems == []
    assert tally.cases == 80
    assert {outcome.split()[-1] for outcome in tally.outcomes} >= {"400", "401", "404"}


@pytest.mark.parametrize(
    ("asks_token", "replies", "problem"),
    [
        (False, [(400, b'{"error": "x"}')], None),
        (True, [(401, b'{"error": "x"}')], None),
        (False, [], "0 answers"),
        (False, [(400, b'{"error": "x"}'), (200, b"{}")], "2 answers"),
        (False, [(200, b"{}")], "status 200; expected 4xx"),
        (False, [(500, b'{"error": "x"}')], "status 500; expected 4xx"),
        (False, [(503, b'{"error": "x"}')], "503 without Retry-After"),
        (False, [(400, b"{}")], "the answer has no error"),
        (True, [(404, b'{"error": "x"}')], "status 404 without the token"),
    ],
)
def test_wrong_answers_to_malformed_requests_are_noticed(
    asks_token: bool, replies: list[tuple[int, bytes]], problem: str | None
) -> None:
    case = requests.Malformed("kind", b"", asks_token)
    found = requests.problem_of(case, [Reply(status, {}, body) for status, body in replies])
    assert found is None if problem is None else problem in str(found)
