"""The results of a benchmark in sentences, and its rows as curves over the length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from effexport.base.formatting import NOTHING, counted, duration, duration_with, listed, memory, three_digits
from effexport.bench.grid import BenchResults, BenchRow
from effexport.render.document import Item

Row = TypeVar("Row")
NO_REASON = "no reason is known"
DISTURBED = "not compared: other programs disturbed the timings"


def crossover(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    """Compare two curves, each time by length, at the lengths that both have. Equal times do not count as faster.

    Returns the end of a sentence that begins with "linear on ort is …".
    """
    first, last = (end(candidate.keys() & baseline, default=0) for end in (min, max))
    if not first:
        return "not compared: no length was measured of both"
    found = crossings(candidate, baseline)
    begins_faster = candidate[first] < baseline[first]
    about = ", ".join(f"{_rounded(length):,}" for length in found)
    measured = " to ".join(dict.fromkeys(f"{length:,}" for length in (first, last)))
    if len(found) > 1:
        return f"faster on some stretches: the curves cross at about {about} tokens"
    if found:
        return f"faster up to about {about} tokens" if begins_faster else f"faster from about {about} tokens on"
    which = "at every measured length" if begins_faster else "at none of the measured lengths"
    return f"faster {which} ({measured})"


def crossings(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[float, ...]:
    """The lengths in tokens at which two curves cross, in order; interpolated on logarithmic axes."""
    lengths = sorted(candidate.keys() & baseline)
    ratios = [(length, math.log(candidate[length] / baseline[length])) for length in lengths]
    return tuple(
        start * (end / start) ** (before / (before - after))
        for (start, before), (end, after) in itertools.pairwise(ratios)
        if (before < 0) != (after < 0)
    )


def _rounded(length: float) -> int:
    """An interpolated length to three digits, which is precise enough; a measured length in full."""
    whole = round(length)
    return whole if math.isclose(length, whole, rel_tol=1e-9) else round(float(f"{length:.3g}"))


BASELINE = "softmax"


@dataclass(frozen=True)
class Curve:
    """The rows of one model in one setting, in order of length.

    place: the setting, which compared models must share: the runtime, and what else differs within the benchmark.
    """

    label: str
    place: str
    rows: tuple[BenchRow, ...]

    @property
    def is_baseline(self) -> bool:
        return self.rows[0].case.variant == BASELINE

    def values(self, read: Callable[[BenchRow], float | None]) -> dict[int, float]:
        """Values of the rows whose timing may be quoted, by length."""
        known = ((row.case.seq_len, read(row)) for row in self.rows if row.is_quotable)
        return {length: value for length, value in known if value is not None}

    def medians(self) -> dict[int, float]:
        return self.values(lambda row: row.median_ms)

    @property
    def is_disturbed(self) -> bool:
        return any(row.status == "disturbed" for row in self.rows)


def curves(results: BenchResults) -> list[Curve]:
    """All curves, softmax first, the others in the order of the rows."""
    cases = [row.case for row in results.rows]
    settings = [(case.runtime, case.scope, case.precision, f"batch {case.batch}") for case in cases]
    groups = grouped(results.rows, [case.label for case in cases], settings, always=1)
    found = [
        Curve(label, place, tuple(sorted(rows, key=lambda row: row.case.seq_len)))
        for (label, place), rows in groups.items()
    ]
    return sorted(found, key=lambda curve: not curve.is_baseline)


def grouped(
    rows: Sequence[Row], labels: Sequence[str], settings: Sequence[tuple[str, ...]], always: int = 0
) -> dict[tuple[str, str], list[Row]]:
    """The rows of each model in each place, which names the parts of a setting that differ, and the first `always`."""
    shown = [n for n, parts in enumerate(zip(*settings, strict=True)) if n < always or len(set(parts)) > 1]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row, label, setting in zip(rows, labels, settings, strict=True):
        groups.setdefault((label, ", ".join(setting[n] for n in shown if setting[n])), []).append(row)
    return groups


def baseline_of(curve: Curve, among: Iterable[Curve]) -> Curve | None:
    """Softmax in the same setting; None if it was not measured, and for softmax itself."""
    if curve.is_baseline:
        return None
    return next((one for one in among if one.is_baseline and one.place == curve.place), None)


def crossovers(found: Sequence[Curve]) -> list[tuple[Curve, str]]:
    """For each curve that was timed and has a baseline, where its medians cross those of the baseline.

    A curve with a disturbed row is not compared: without this length, it might seem to cross elsewhere or never.
    """
    pairs = [(curve, baseline_of(curve, found)) for curve in found if curve.medians() or curve.is_disturbed]
    return [
        (curve, DISTURBED if curve.is_disturbed or other.is_disturbed else crossover(curve.medians(), other.medians()))
        for curve, other in pairs
        if other
    ]


Verdict = Literal["passed", "failed", "not run"]
BUSY = "Most timings vary by more than a quarter of their median: other programs are probably using this machine."
BELOW_FLOOR = (
    "Some rows are faster than their floor (× floor below 1): the floor uses PyTorch's matrix products, whose results "
    "go through memory; fused kernels keep them in the cache."
)


def verdict(results: BenchResults) -> Verdict:
    """The verdict on parity; a disturbed row counts. failed: a row failed. not run: a missing row might fail."""
    if any(row.status == "failed" or (row.parity and not row.parity.passed) for row in results.rows):
        return "failed"
    whole = results.complete and results.rows and all(row.status != "not run" for row in results.rows)
    return "passed" if whole else "not run"


def interruption(results: BenchResults) -> str:
    """A sentence for an interrupted benchmark; "" for a complete one."""
    if results.complete:
        return ""
    return f"Interrupted after {counted(len(results.rows), 'row')}. The other rows are missing."


def disturbance(results: BenchResults) -> str:
    """A warning if other programs disturbed rows; "" if not."""
    count = sum(row.status == "disturbed" for row in results.rows)
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
    """The parity of the timed candidates in sentences, and the candidates without a timing."""
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
    if others := [row for row in results.rows if row.status == "failed" and row not in wrong]:
        parts.append(f"{counted(len(others), 'row')} failed for another reason.")
    if missing := sum(row.status == "not run" for row in results.rows):
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


def problems(results: BenchResults) -> list[Item]:
    """Reasons why rows have no timing to quote, and notes on their measurement; once for all rows that share one."""
    groups: dict[tuple[str, str], list[BenchRow]] = {}
    for row in results.rows:
        reason = "" if row.is_quotable else row.reason or NO_REASON
        for status, text in ((row.status, reason), ("note", row.note)):
            if text:
                groups.setdefault((status, text), []).append(row)
    ordered = sorted(groups.items(), key=lambda entry: entry[0][0])
    return [Item(status, f"{text} ({_labels(rows)})") for (status, text), rows in ordered]


def remarks(results: BenchResults) -> list[str]:
    """Warnings about all timings: that they vary much, and that some are below their floor."""
    timings = [row.timing for row in results.rows if row.timing is not None and row.is_quotable]
    wide = [timing for timing in timings if timing.spread_ms > 0.25 * timing.median_ms]
    found = [BUSY] if timings and 2 * len(wide) >= len(timings) else []
    is_below = any(row.times_floor is not None and row.times_floor < 1 for row in results.rows)
    return [*found, BELOW_FLOOR] if is_below else found


def median_text(row: BenchRow) -> str:
    """`12.3 ± 0.42 ms`: the median and its spread."""
    return NOTHING if row.timing is None else duration_with(row.timing.median_ms, row.timing.spread_ms)


def _labels(rows: Sequence[BenchRow]) -> str:
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
    rows = [row for curve in group for row in curve.rows if row.is_quotable or row.status == "disturbed"]
    longest = max(row.case.seq_len for row in rows)
    at_end = sorted((row for row in rows if row.case.seq_len == longest), key=lambda row: row.median_ms or 0.0)
    where = f"At {longest:,} tokens on {group[0].place}"
    if any(row.status == "disturbed" for row in at_end):
        return -longest, math.inf, f"{where}, other programs disturbed the timings, so no model is named the fastest."
    best, *others = at_end
    label, median = best.case.label, best.median_ms or math.inf
    what = f"{label} is the fastest" if others else f"only {label} was timed,"
    more = ""
    if best.case.variant != BASELINE:
        more = _beside_baseline(best, next(curve for curve in group if best in curve.rows), found)
    elif others:
        slower = three_digits((others[0].median_ms or 0.0) / median)
        more = f"; {others[0].case.label} is next and takes {slower} times as long"
    return -longest, 1 / (best.tokens_per_second or 1), f"{where}, {what} with {duration(median)}{more}."


def _beside_baseline(row: BenchRow, curve: Curve, found: Sequence[Curve]) -> str:
    """`: 12.7 times as fast as softmax, and 22.8 times less memory (…)`."""
    parts = []
    if row.times_softmax is not None:
        parts.append(f"{three_digits(row.times_softmax)} times as fast as {BASELINE}")
    baseline = baseline_of(curve, found)
    other = next((one for one in baseline.rows if one.case.seq_len == row.case.seq_len), None) if baseline else None
    if other and other.peak_bytes and row.peak_bytes:
        share = other.peak_bytes / row.peak_bytes
        sizes = f"{memory(row.peak_bytes)} against {memory(other.peak_bytes)}"
        change = f"{three_digits(share)} times less" if share >= 1 else f"{three_digits(1 / share)} times as much"
        parts.append(f"with {change} memory ({sizes})")
    if not parts:
        return f"; {BASELINE} was not timed there" if other is None or other.timing is None else ""
    return f": {', '.join(parts)}"
