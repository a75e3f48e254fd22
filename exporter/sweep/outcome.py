"""What an attempt at a cell came to, wherever it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ARTIFACT, LOG, OUTCOME, REQUEST = "artifact", "log.txt", "outcome.json", "request.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """status: "finished" with an artifact, or "failed" with a reason.

    stage: of the build that failed, "" where it has no name. log: the end of what the attempt printed. seconds: of the
    whole attempt. peak_bytes: the most memory of its process, where it lived to say so. where: host and process.
    versions: of what decides the result, there. files: size in bytes of every file of the artifact.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """The inverse of `to_dict`. Raises TypeError for anything else."""
        return cls(**values)
