"""Reasons to refuse a request. The answer has the status of the reason and a JSON message, `{"error": …}`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A kind of refused request: its status, and the label of the metric that counts it."""

    status: int
    reason: str


INVALID = Refusal(400, "invalid")
BAD_HEAD = Refusal(400, "bad_head")
UNAUTHORIZED = Refusal(401, "unauthorized")
FORBIDDEN = Refusal(403, "forbidden")
NOT_FOUND = Refusal(404, "not_found")
SLOW_BODY = Refusal(408, "slow_body")
TOO_LARGE = Refusal(413, "too_large")
UNSUPPORTED_ENCODING = Refusal(415, "unsupported_encoding")
LARGE_HEAD = Refusal(431, "large_head")
FAILED = Refusal(500, "failed")
QUEUE_FULL = Refusal(503, "queue_full")
WAITED_TOO_LONG = Refusal(503, "waited_too_long")
NO_MEMORY = Refusal(503, "too_many_bytes")
CROWDED = Refusal(503, "too_many_connections")
STOPPING = Refusal(503, "stopping")


class RequestError(Exception):
    """A refused request. The message says what was given, what was expected and what to do."""

    def __init__(self, message: str, kind: Refusal = INVALID) -> None:
        super().__init__(message)
        self.kind = kind


class ClientGoneError(Exception):
    """The client closed its connection before it was answered."""
