"""Findings of one part of the campaign."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Outcomes of the cases of one part.

    outcomes: how often each expected outcome occurred, by its name, such as "refused". problems: one line for each case
    that ended in any other way, with what repeats it.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.outcomes.total() + len(self.problems)
