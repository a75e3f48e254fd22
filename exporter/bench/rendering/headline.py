"""The results of a benchmark in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from effexport.bench.rendering.curves import BASELINE, Curve, baseline_of, curves
from effexport.bench.results import BenchResults, Row, Status
from effexport.units import counted, duration, listed, memory, number, three_digits

Verdict = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Problem:
    """Rows without a timing for the same reason. rows: their number and models."""

    status: str
    reason: str
    rows: str


def verdict(results: BenchResults) -> Verdict:
    """The verdict on parity; a disturbed row counts. failed: a row failed. not run: a missing row might fail."""
    if any(_failed(row) for row in results.rows):
        return "failed"
    whole = results.complete and results.rows and all(status_of(row) != "not run" for row in results.rows)
    return "passed" if whole else "not run"


def interruption(results: BenchResults) -> str:
    """A sentence for an interrupted benchmark; "" for a complete one."""
    if results.complete:
        return ""
    if not results.rows:
        return "Interrupted before the first row was finished."
    return f"Interrupted after {counted(len(results.rows), 'row')}. The other rows are missing."


def disturbance(results: BenchResults) -> str:
    """A warning if other programs disturbed rows; "" if not."""
    count = sum(status_of(row) == "disturbed" for row in results.rows)
    if not count:
        return ""
    known = [row.disturbance.other_cores for row in results.rows if row.disturbance]
    used = max((cores for cores in known if cores is not None), default=None)
    others = "" if used is None else f", which used up to {used:.1f} of {results.machine.get('cores', '?')} cores,"
    rows = "the only row" if len(results.rows) == 1 else f"{count:,} of {len(results.rows):,} rows"
    these = "this row" if count == 1 else "these rows"
    return (
        f"Other programs{others} disturbed {rows}. No ratio, rank or crossover is derived from {these}. "
        "Measure again on an idle machine, or with --wait-idle."
    )


def parity_sentence(results: BenchResults) -> str:
    """Whether the timed candidates compute the right result, and which have no timing."""
    compared = [row for row in results.rows if row.parity and (row.parity.value is not None or not row.parity.passed)]
    wrong = [row for row in compared if row.parity and not row.parity.passed]
    parts = []
    one = len(compared) == 1
    if wrong:
        who = "The one candidate" if one else f"{len(wrong):,} of {len(compared):,} candidates"
        parts.append(f"{who} failed parity: {_labels(wrong)}.")
    elif compared:
        parts.append("The one candidate passed parity." if one else f"All {len(compared):,} candidates passed parity.")
    else:
        parts.append("No candidate was compared with a reference.")
    others = [row for row in results.rows if row.status == "failed" and row not in wrong]
    if others:
        parts.append(f"{counted(len(others), 'row')} failed for another reason.")
    missing = sum(status_of(row) == "not run" for row in results.rows)
    if missing:
        parts.append(f"{counted(missing, 'row was', 'rows were')} not run.")
    return " ".join(parts)


def headlines(results: BenchResults) -> list[str]:
    """The fastest model at the longest timed length of each runtime, fastest runtime first."""
    found = [curve for curve in curves(results) if curve.medians() or curve.is_disturbed]
    if not found:
        return ["Nothing was timed."]
    groups: dict[str, list[Curve]] = {}
    for curve in found:
        groups.setdefault(curve.place, []).append(curve)
    ranked = [_headline(group, found) for group in groups.values()]
    return [sentence for _, _, sentence in sorted(ranked, key=lambda entry: entry[:2])]


def problems(results: BenchResults) -> list[Problem]:
    """Rows that have no timing, by reason."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if not row.is_quotable:
            groups.setdefault((status_of(row), reason_of(row)), []).append(row)
    return [
        Problem(status, reason, f"{counted(len(rows), 'row')} ({_labels(rows)})")
        for (status, reason), rows in sorted(groups.items(), key=lambda entry: entry[0][0])
    ]


def status_of(row: Row) -> Status:
    """The status of a row: failed if its parity failed, not run if it has no timing."""
    if _failed(row):
        return "failed"
    return "not run" if row.timing is None else row.status


def reason_of(row: Row) -> str:
    """Why a row has no timing; if its parity failed, with the values."""
    parts = [row.reason]
    if row.parity and not row.parity.passed:
        if row.parity.value is not None:
            parts.append(f"{row.parity.metric} {number(row.parity.value)}, limit {number(row.parity.limit)}")
        parts.append(row.parity.detail)
    return "; ".join(dict.fromkeys(part for part in parts if part)) or "no reason is known"


def _failed(row: Row) -> bool:
    return row.status == "failed" or (row.parity is not None and not row.parity.passed)


def _labels(rows: Sequence[Row]) -> str:
    """`linear on torch and ort at 512 and 1,024 tokens; …`."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        case = row.case
        size = f"{case.seq_len:,}" if case.batch == 1 else f"{case.batch} × {case.seq_len:,}"
        known = sizes.setdefault((case.label, case.runtime), [])
        if size not in known:
            known.append(size)
    runtimes: dict[tuple[str, str], list[str]] = {}
    for (label, runtime), found in sizes.items():
        runtimes.setdefault((label, listed(found)), []).append(runtime)
    return "; ".join(f"{label} on {listed(found)} at {size} tokens" for (label, size), found in runtimes.items())


def _headline(group: Sequence[Curve], found: Sequence[Curve]) -> tuple[int, float, str]:
    """For one place, a sort key (minus the length, the time per token of the fastest) and the sentence."""
    rows = [row for curve in group for row in curve.rows]
    longest = max(row.case.seq_len for row in rows if row.is_quotable or row.status == "disturbed")
    if any(row.status == "disturbed" and row.case.seq_len == longest for row in rows):
        where = f"At {longest:,} tokens on {group[0].place}"
        return -longest, math.inf, f"{where}, other programs disturbed the timings, so no model is named the fastest."
    at_end = sorted((c for c in group if longest in c.medians()), key=lambda curve: curve.medians()[longest])
    best = at_end[0]
    row = next(row for row in best.rows if row.case.seq_len == longest and row.is_quotable)
    sentence = f"At {longest:,} tokens on {best.place}, {best.label} is the fastest"
    if len(at_end) == 1:
        sentence = f"At {longest:,} tokens on {best.place}, only {best.label} was timed,"
    sentence += f" with {duration(best.medians()[longest])}"
    if best.is_baseline:
        if len(at_end) > 1:
            slower = at_end[1].medians()[longest] / best.medians()[longest]
            sentence += f"; {at_end[1].label} is next and takes {three_digits(slower)} times as long"
    else:
        sentence += _beside_baseline(row, best, found)
    return -longest, 1 / (row.tokens_per_second or 1), f"{sentence}."


def _beside_baseline(row: Row, curve: Curve, found: Sequence[Curve]) -> str:
    """`: 12.7 times as fast as softmax, and 22.8 times less memory (…)`."""
    parts = []
    if row.times_softmax is not None:
        parts.append(f"{three_digits(row.times_softmax)} times as fast as {BASELINE}")
    baseline = baseline_of(curve, found)
    other = _row_at(baseline, row.case.seq_len) if baseline else None
    if other and other.peak_bytes and row.peak_bytes:
        share = other.peak_bytes / row.peak_bytes
        sizes = f"{memory(row.peak_bytes)} against {memory(other.peak_bytes)}"
        change = f"{three_digits(share)} times less" if share >= 1 else f"{three_digits(1 / share)} times as much"
        parts.append(f"with {change} memory ({sizes})")
    if not parts:
        return f"; {BASELINE} was not timed there" if other is None or other.timing is None else ""
    return f": {', '.join(parts)}"


def _row_at(curve: Curve, length: int) -> Row | None:
    return next((row for row in curve.rows if row.case.seq_len == length), None)
