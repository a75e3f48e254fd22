"""Problems that the attack on a server reports; scripts/soak.sh runs it."""

from __future__ import annotations

import pytest
from campaign import requests
from serving_load import Reply

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "serve")


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
