"""Kinds of refused requests, and the errors that refuse them. An answer has the status of its kind, and the message."""

from __future__ import annotations

from typing import NamedTuple

from effexport.base.errors import RefusedNumbersError, UserError


class Refusal(NamedTuple):
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


class RequestError(UserError):
    """A refused request. The message says what was given, what was expected and what to do."""

    def __init__(self, message: str, kind: Refusal = INVALID) -> None:
        super().__init__(message)
        self.kind = kind


class ClientGoneError(Exception):
    """The client closed its connection before it was answered."""


def refusal_of(error: Exception) -> Refusal:
    """The kind of any error: users can mend what they sent, and nothing else."""
    if isinstance(error, RequestError):
        return error.kind
    return INVALID if isinstance(error, UserError | RefusedNumbersError) else FAILED


def stopping() -> RequestError:
    return RequestError("the server is stopping; send the request to another one", STOPPING)
