"""The outcome of an attempt at a cell, and the names of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ARTIFACT, LOG, OUTCOME, REQUEST = "artifact", "log.txt", "outcome.json", "request.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an attempt. status: "finished" with an artifact, or "failed" with a reason.

    stage: the stage of the build that failed; "" if unknown. log: the end of the attempt's output. seconds: duration of
    the whole attempt. peak_bytes: peak memory of its process; None if it was killed. where: host and process.
    versions: of the packages that decide the result. files: size in bytes of every file of the artifact.
    """

    status: Literal["finished", "failed"]
    reason: str = ""
    stage: str = ""
    log: str = ""
    seconds: float = 0.0
    peak_bytes: int | None = None
    where: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
