"""What a check says, and how results add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from effexport.proof.cases import Case
from effexport.proof.tolerances import Limit

Status = Literal["passed", "failed", "not run"]
METRIC = "max |error| / RMS"
# Relative errors from 1e-9 to 1, one decade each.
HISTOGRAM_EDGES = tuple(10.0**exponent for exponent in range(-9, 1))
OUTSIDE = "is outside the shapes that the model was built for"


@dataclass(frozen=True)
class Worst:
    """The element of an output that is furthest from what was expected, relative to the scale of its sample."""

    output: str
    index: tuple[int, ...]
    actual: float
    expected: float


@dataclass(frozen=True)
class Check:
    """One result: what was compared (`name`, `case`), by which metric, and whether it passed.

    value and limit are numbers where the metric has them; `reason` explains the limit, or why it was not run; `detail`
    adds what helps to find a failure.
    measures: other figures of the same comparison, by name: max_abs, rms_error (relative), cosine.
    seq_len: tokens of the case. histogram: how many elements have a relative error in each of HISTOGRAM_EDGES' decades,
    below the first edge and beyond the last included.
    """

    name: str
    case: str
    metric: str
    status: Status
    value: float | None = None
    limit: float | None = None
    reason: str = ""
    detail: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    worst: Worst | None = None
    seq_len: int | None = None
    histogram: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def passed(checks: Sequence[Check]) -> bool:
    """At least one check ran, and none failed."""
    return any(c.status == "passed" for c in checks) and all(c.status != "failed" for c in checks)


def judged(name: str, case: Case, metric: str, value: float, limit: Limit, detail: str = "") -> Check:
    """A check against a limit. Written so that NaN fails."""
    status: Status = "passed" if value <= limit.value else "failed"
    seq_len = int(case.keep.shape[-1])
    return Check(name, case.title, metric, status, value, limit.value, limit.reason, detail, seq_len=seq_len)


def summary(checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """Per kind of check: how many passed, failed or did not run, and the worst value beside its limit."""
    result: dict[str, dict[str, Any]] = {}
    for check in checks:
        entry = result.setdefault(
            check.name,
            {"passed": 0, "failed": 0, "not run": 0, "worst": None, "limit": None, "metric": check.metric},
        )
        entry[check.status] += 1
        if check.value is None or check.limit is None:
            continue
        # the worst is the one closest to its own limit, or beyond it; NaN is beyond every limit
        if entry["worst"] is None or not _share(check.value, check.limit) <= _share(entry["worst"], entry["limit"]):
            entry["worst"], entry["limit"] = check.value, check.limit
    return result


def _share(value: float, limit: float) -> float:
    if value != value:
        return float("inf")
    return value / limit if limit > 0 else value
