"""The interface between a sweep and the machine or cluster that runs its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from effexport.sweep.cell import Cell
from effexport.sweep.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a cell.

    kind: started; ended, with an outcome; lost, with its node or worker; unplaceable, because no node can run it.
    folder: the folder given to `submit` once nothing more is written to it; it has the artifact of a finished cell.
    """

    kind: Literal["started", "ended", "lost", "unplaceable"]
    cell: Cell
    where: str = ""
    reason: str = ""
    outcome: Outcome | None = None
    folder: Path | None = None


class Executor(Protocol):
    """Something that runs cells. title: its name in words."""

    @property
    def title(self) -> str: ...

    def submit(self, cell: Cell, folder: Path) -> None:
        """Start or queue an attempt; its artifact goes into `folder`, which is empty."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """The events since the last call; waits up to `seconds` for the first one."""
        ...

    def close(self) -> None:
        """End everything that still runs."""
        ...
