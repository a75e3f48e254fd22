"""The goals stage: every goal of the operators and the layers, met or missed, in a short table."""

from __future__ import annotations

from typing import Any

from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run
from gpu.timing import KERNEL

NOT_MEASURED = "not measured"
MET, MISSED = "met", "missed"


def compare(run: Run) -> Result:
    """Passed if every goal has times to compare; a missed goal is a result, and not a failure."""
    measured = {stage: run.result_of(stage) for stage in ("timing", "layers")}
    timings = [one for result in measured.values() if result for one in result.details.get("timings", [])]
    rows = [row for timing in timings for row in rows_of(timing)]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (MET, MISSED, NOT_MEASURED)}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "nothing to compare"
    incomplete = [stage for stage, result in measured.items() if result is None or result.status != PASSED]
    if incomplete:
        summary += f"; {' and '.join(incomplete)} did not pass with these sources on this device"
    unknown = [row for row in rows if row["missing"]]
    unmeasured = bool(incomplete) or not rows or (counts[NOT_MEASURED] and not run.device.emulated)
    status = FAILED if unknown else NOT_RUN if unmeasured else PASSED
    return Result(status, summary, {"goals": rows}, "\n".join(table(rows)))


def rows_of(timing: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of one case, with what was measured. missing: a time that should have been read, and was not."""
    readings = timing.get("readings", {})
    rows = []
    for goal in timing.get("goals", []):
        name = goal.get("baseline")
        kernel, baseline = readings.get(KERNEL), readings.get(name)
        missing = kernel is None or (name is not None and baseline is None)
        kernel_us = None if kernel is None else kernel["us"]
        baseline_us = None if baseline is None else baseline["us"]
        bound_us = timing.get("bound_us")
        rows.append(
            {
                "op": timing["op"],
                "case": timing["case"],
                "goal": text_of(goal),
                "kernel_us": kernel_us,
                "baseline_us": baseline_us,
                "bound_us": bound_us,
                "verdict": verdict(goal, kernel_us, baseline_us, bound_us),
                "missing": missing,
                "reason": goal["reason"],
            }
        )
    return rows


def text_of(goal: dict[str, Any]) -> str:
    if "at_most" in goal:
        return f"at most {goal['at_most']:g} × its bound"
    return f"{'' if goal['times'] == 1 else format(goal['times'], 'g') + ' × '}as fast as {goal['baseline']}"


def verdict(goal: dict[str, Any], kernel_us: float | None, baseline_us: float | None, bound_us: float | None) -> str:
    limit = times(bound_us, goal["at_most"]) if "at_most" in goal else times(baseline_us, 1 / goal["times"])
    if kernel_us is None or limit is None:
        return NOT_MEASURED
    return MET if kernel_us <= limit else MISSED


def times(us: float | None, factor: float) -> float | None:
    return None if us is None else us * factor


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of about 120 characters: kernel, its lower bound and its baseline in microseconds."""
    lines = [f"{'':22} {'':46} {'µs':>8} {'bound':>7} {'baseline':>8}  goal"]
    for row in rows:
        times = [
            microseconds(row[key], width) for key, width in (("kernel_us", 8), ("bound_us", 7), ("baseline_us", 8))
        ]
        lines.append(f"{row['op']:22} {row['case'][:46]:46} {' '.join(times)}  {row['goal']}: {row['verdict']}")
    return lines


def microseconds(value: float | None, width: int) -> str:
    return " " * (width - 1) + "–" if value is None else f"{value:{width}.1f}"
