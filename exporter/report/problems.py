"""Checks that failed or did not run, collapsed: one entry for all cases of a check, and no reason twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effexport.base.units import counted, listed, number
from effexport.proof.check import ALL_CASES, Check, excess


@dataclass(frozen=True)
class Problem:
    """Checks of one name that failed, or checks that did not run for the same reason.

    ran: how many checks of the name of a failure ran.
    """

    checks: tuple[Check, ...]
    ran: int = 0

    @property
    def outcome(self) -> str:
        """ "failed", "not run" or "not applicable"."""
        return self.checks[0].outcome

    @property
    def worst(self) -> Check:
        """The check that is furthest beyond its limit."""
        return max(self.checks, key=lambda check: excess(check.value, check.limit))

    @property
    def subject(self) -> str:
        """`arithmetic in 2 of 6 cases, most in short (2 × 7)`."""
        names = listed(list(dict.fromkeys(check.name for check in self.checks)))
        worst = self.worst.case
        place = f"{worst.name} ({worst.shape_text})" if worst.shape else worst.name
        if len(self.checks) == 1:
            return names if worst == ALL_CASES else f"{names} in {place}"
        if self.outcome == "failed":
            return f"{names} in {len(self.checks)} of {counted(self.ran, 'case')}, most in {place}"
        return names

    @property
    def finding(self) -> str:
        """The worst check's measurement and its place; or the reason nothing was measured."""
        check = self.worst
        if check.status != "failed":
            return check.reason or check.detail
        value = "" if check.value is None else f"{check.metric} {number(check.value)}, limit {number(check.limit)}"
        return "; ".join(part for part in (value, check.detail) if part) or check.metric

    @property
    def text(self) -> str:
        """One sentence without the reason of a limit, which is never the cause of a failure."""
        return f"{self.outcome}: {self.subject}: {self.finding}"


def problems_of(checks: Sequence[Check]) -> list[Problem]:
    """Failures by name, then what did not run by its reason, then what does not apply."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        if check.status != "passed":
            key = check.name if check.status == "failed" else check.reason or check.detail
            groups.setdefault((check.outcome, key), []).append(check)
    ran: dict[str, int] = {}
    for check in checks:
        ran[check.name] = ran.get(check.name, 0) + (check.status != "not run")
    found = [Problem(tuple(group), ran[group[0].name]) for group in groups.values()]
    return sorted(found, key=lambda problem: ("failed", "not run", "not applicable").index(problem.outcome))
