"""Where cells run: what the sweep asks of a machine or a cluster, and what it hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from effexport.sweep.cell import Cell
from effexport.sweep.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Event:
    """started: somewhere. ended: with an outcome. lost: with the node it ran on, or its worker; nothing of it will
    arrive. unplaceable: no node can run it.

    folder: what was given to `submit`, when nothing more is written into it; it has the artifact of what "finished".
    """

    kind: Literal["started", "ended", "lost", "unplaceable"]
    cell: Cell
    where: str = ""
    reason: str = ""
    outcome: Outcome | None = None
    folder: Path | None = None


class Executor(Protocol):
    """title: in words, for people. slots: about how many cells run at a time, for the time left."""

    @property
    def title(self) -> str: ...

    @property
    def slots(self) -> int: ...

    def submit(self, cell: Cell, folder: Path) -> None:
        """Begin an attempt, or queue it; `folder` is empty, and receives its artifact."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """What happened since the last call; waits up to `seconds` for something to happen."""
        ...

    def close(self) -> None:
        """End whatever still runs."""
        ...
