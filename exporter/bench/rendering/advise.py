"""The rows of a plan as advice: what to use, how to get it, and why everything else fell out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from effexport.bench.grid import model_of_case
from effexport.bench.limits import Limits
from effexport.bench.measuring.plan import MOST_DISTURBED, Plan
from effexport.bench.rendering.build_command import BuildCommand, command_from_case
from effexport.bench.results import BenchResults, Case, Row
from effexport.units import NOTHING, counted, duration, duration_with, listed, memory, three_digits

Standing = Literal[
    "use this", "fits", "–", "memory unknown", "disturbed", "over the limit", "not measured", "failed", "not reached"
]
# The order of the table. Without any limit, "–" stands for "fits".
STANDINGS: tuple[Standing, ...] = (
    *("use this", "fits", "–", "memory unknown", "disturbed", "over the limit"),
    *("not measured", "failed", "not reached"),
)
OTHER_MODELS = (
    "The variants are different models, not implementations of one model: they cannot share weights, so this is a "
    "choice to make before training."
)
NOTHING_MEASURED = "Nothing was measured, so there is no advice; the table says why."
DISTURBED = "Other programs disturbed {}; repeat this on an idle machine, or with --wait-idle."


@dataclass(frozen=True)
class Entry:
    """One candidate of an advice. row: its measurement at the full length, or None. why: its standing in words."""

    label: str
    runtime: str
    standing: Standing
    why: str = ""
    row: Row | None = None

    @property
    def name(self) -> str:
        return f"{self.label} on {self.runtime}"

    @property
    def latency_ms(self) -> float | None:
        return None if self.row is None or self.row.timing is None else self.row.timing.median_ms

    @property
    def latency(self) -> str:
        """`12.3 ± 0.42 ms`: the median and its spread."""
        if self.row is None or self.row.timing is None:
            return NOTHING
        return duration_with(self.row.timing.median_ms, self.row.timing.spread_ms)

    @property
    def peak_bytes(self) -> int | None:
        return None if self.row is None else self.row.peak_bytes

    @property
    def is_disturbed(self) -> bool:
        """Whether its timing is too long because of other programs."""
        return self.latency_ms is not None and self.row is not None and not self.row.is_quotable

    @property
    def figures(self) -> str:
        """`182 ms and 392 MB`, as far as they are known."""
        return listed([duration(self.latency_ms)] + ([] if self.peak_bytes is None else [memory(self.peak_bytes)]))


@dataclass(frozen=True)
class Advice:
    """The candidates, the best first. sentences: what to do, then caveats. model: what was measured.

    build: how to get the recommended one; None if nothing is recommended, or there is nothing to build.
    """

    entries: tuple[Entry, ...]
    limits: Limits
    sentences: tuple[str, ...]
    model: str
    build: BuildCommand | None


def advice_from_results(results: BenchResults, plan: Plan) -> Advice:
    """The advice that the rows of a plan support; those of shorter lengths are not ranked."""
    entries = ranked(results, plan)
    measured = any(row.timing is not None for row in results.rows)
    best = next((entry for entry in entries if entry.standing in ("use this", "fits", "–")), None)
    first = sentences_of_best(best, entries, plan) if best else sentences_of_none(entries, plan, measured=measured)
    sentences = (*first, *caveats(results, entries))
    build = None if best is None or best.row is None else command_from_case(best.row.case, plan.spec_file)
    return Advice(entries, plan.limits, sentences, model_text(plan), build)


def model_text(plan: Plan) -> str:
    """What is measured: `one attention layer (width 256, 4 heads), 1 × 32,768 tokens, fp32`."""
    case = plan.cases[0]
    model = model_of_case(case)
    name = f"an encoder of {counted(model.layers, 'layer')}" if case.scope == "encoder" else "one attention layer"
    size = f"width {model.attention.dim}, {counted(model.attention.heads, 'head')}"
    return f"{name} ({size}), {case.batch} × {case.seq_len:,} tokens, {case.precision}"


def ranked(results: BenchResults, plan: Plan) -> tuple[Entry, ...]:
    """All candidates, the best first. The fastest that fits is to be used, if no disturbed one could be faster."""
    rows = {(row.case.label, row.case.runtime): row for row in results.rows if row.case.model_seq_len is None}
    entries = [entry_of(case, rows.get((case.label, case.runtime)), plan.limits) for case in plan.cases]
    entries += [Entry(variant, "–", "not measured", reason) for variant, reason in plan.refused.items()]
    entries.sort(key=lambda entry: (STANDINGS.index(entry.standing), entry.is_disturbed, entry.latency_ms or 0.0))
    if entries[0].standing in ("fits", "–") and is_fastest(entries[0], entries):
        entries[0] = replace(entries[0], standing="use this")
    return tuple(entries)


def is_fastest(best: Entry, entries: Sequence[Entry]) -> bool:
    """Whether no disturbed entry, the best one included, could be faster than it was measured."""
    disturbed = [entry.latency_ms for entry in entries if entry.is_disturbed and entry.latency_ms is not None]
    return all(best.latency_ms is not None and ms / MOST_DISTURBED > best.latency_ms for ms in disturbed)


def entry_of(case: Case, row: Row | None, limits: Limits) -> Entry:
    if row is None:
        return Entry(case.label, case.runtime, "not reached", "interrupted before it was measured")
    if row.timing is None:
        standing: Standing = "failed" if row.status == "failed" else "not measured"
        return Entry(case.label, case.runtime, standing, row.reason, row)
    standing, why = judged(row, limits)
    disturbed = "" if row.is_quotable else f"disturbed: {row.reason}"
    return Entry(case.label, case.runtime, standing, "; ".join(filter(None, (why, disturbed))), row)


def judged(row: Row, limits: Limits) -> tuple[Standing, str]:
    """Where a timed row stands, and why. A disturbed time is too long, so it may be within a limit but not over it."""
    assert row.timing is not None
    late = over_limit("latency", row.timing.median_ms, limits.latency_ms)
    large = over_limit("memory", row.peak_bytes, limits.memory_bytes)
    if late or large:
        is_known = row.is_quotable or large
        return "over the limit" if is_known else "disturbed", "; ".join(filter(None, (late, large)))
    if limits.memory_bytes is not None and row.peak_bytes is None:
        return "memory unknown", row.note or "its memory was not measured"
    return "fits" if limits.text else "–", ""


def over_limit(name: str, value: float | None, limit: float | None) -> str:
    """`latency 1.50 times the limit`; "" if it is within the limit, or one of the two is unknown."""
    if value is None or limit is None or value <= limit:
        return ""
    return f"{name} {three_digits(value / limit)} times the limit"


def sentences_of_best(best: Entry, entries: Sequence[Entry], plan: Plan) -> Iterator[str]:
    """What to use; if disturbed rows leave that open, what fits, or without any limit what is the fastest so far."""
    assert best.row is not None
    assert best.row.timing is not None
    limits, timing = plan.limits, best.row.timing
    (seq_len,) = plan.grid.seq_lens
    within = f", within {limits.text}" if limits.text else ""
    measured = f"{best.figures} for {seq_len:,} tokens, measured on this machine{within}."
    if best.standing == "use this":
        has_rivals = sum(entry.latency_ms is not None for entry in entries) > 1
        fastest = "the fastest so far" if any(entry.standing == "not reached" for entry in entries) else "the fastest"
        yield f"{best.name} is {fastest}: {measured}" if has_rivals and not within else f"Use {best.name}: {measured}"
    elif within:
        yield f"{best.name} fits: {measured} Another model may be faster."
    elif best.is_disturbed:
        yield f"{best.name} is the fastest, but it was disturbed: {measured} Another model may be faster."
    else:
        yield f"{best.name} is the fastest that was not disturbed: {measured} Another model may be faster."
    if limits.latency_ms is not None and timing.highest_ms > limits.latency_ms:
        slowest = duration(timing.highest_ms)
        yield f"That is the median; the slowest of {counted(timing.runs, 'run')} took {slowest}, over the limit."


def sentences_of_none(entries: Sequence[Entry], plan: Plan, *, measured: bool) -> Iterator[str]:
    """Why there is nothing to recommend, and what comes closest."""
    if not measured:
        yield NOTHING_MEASURED
        return
    (seq_len,) = plan.grid.seq_lens
    unknown = [entry for entry in entries if entry.standing == "memory unknown"]
    over = [entry for entry in entries if entry.standing == "over the limit"]
    what = f"meets {plan.limits.text}" if plan.limits.text else "was timed"
    reached = "No model" if all(entry.standing != "not reached" for entry in entries) else "None of the models so far"
    if unknown:
        yield f"{unknown[0].name} is fast enough with {unknown[0].figures}, but its memory is unknown."
        return
    disturbed = [entry for entry in entries if entry.standing == "disturbed"]
    if disturbed:
        yield f"No conclusion: {disturbed[0].name} took {duration(disturbed[0].latency_ms)}, but it was disturbed."
        return
    yield f"{reached} {what} for {seq_len:,} tokens on this machine."
    if over:
        yield f"The fastest that was measured is {over[0].name} with {over[0].figures}."


def caveats(results: BenchResults, entries: Sequence[Entry]) -> Iterator[str]:
    disturbed = sum(entry.is_disturbed for entry in entries)
    if disturbed:
        yield DISTURBED.format(counted(disturbed, "measurement"))
    if not results.complete:
        missing = sum(entry.standing == "not reached" for entry in entries)
        yield f"Interrupted: {counted(missing, 'candidate was', 'candidates were')} not measured."
    if sum(entry.latency_ms is not None for entry in entries) > 1:
        yield OTHER_MODELS
