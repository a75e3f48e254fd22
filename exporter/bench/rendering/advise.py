"""The rows of a plan as advice: what to use, how to get it, and why everything else fell out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from effexport.bench.grid import model_of_case
from effexport.bench.limits import Limits
from effexport.bench.measuring.plan import MOST_DISTURBED, Plan
from effexport.bench.rendering.build_command import BuildCommand, command_from_case
from effexport.bench.rendering.entries import FITTING, STANDINGS, Entry, Standing
from effexport.bench.rendering.frontier import OTHER_WEIGHTS, on_frontier, sentences_of_frontier, with_frontier
from effexport.bench.results import BenchResults, Case, Row
from effexport.processor import Processor
from effexport.runtimes import BFLOAT16_RUNTIME
from effexport.units import counted, duration, three_digits

OTHER_MODELS = (
    "The variants are different models, not implementations of one model: they cannot share weights, so this is a "
    "choice to make before training."
)
NOTHING_MEASURED = "Nothing was measured, so there is no advice; the table says why."
# Variants without a part that must be float32, see `around_in_float32` in plugins/ops.py.
BFLOAT16_VARIANTS = ("softmax", "linear", "aft")
BFLOAT16_HERE = (
    "This processor multiplies bfloat16 in tiles (AMX): on such a one, {} with --runtime openvino "
    "--precision-hint bf16 took a third of the time of float32. Not measured here; effexport run and effexport verify "
    "take both options."
)
DISTURBED = "Other programs disturbed {}; repeat this on an idle machine, or with --wait-idle."


@dataclass(frozen=True)
class Advice:
    """The candidates, the best first. sentences: what to do, then caveats. model: what was measured.

    build: how to get the recommended one; None if nothing is recommended, or there is nothing to build, as for a model
    that was judged.
    """

    entries: tuple[Entry, ...]
    limits: Limits
    sentences: tuple[str, ...]
    model: str
    build: BuildCommand | None

    @property
    def figure(self) -> str:
        """What the losses are: bits per byte, or loss; "" without any."""
        return next((entry.quality.loss.name for entry in self.entries if entry.quality is not None), "")


def advice_from_results(results: BenchResults, plan: Plan) -> Advice:
    """The advice that the rows of a plan support; those of shorter lengths are not ranked."""
    entries = ranked(results, plan)
    measured = any(row.timing is not None for row in results.rows)
    best = next(iter(on_frontier(entries)), None) or next((one for one in entries if one.standing in FITTING), None)
    first = sentences_of_best(best, entries, plan) if best else sentences_of_none(entries, plan, measured=measured)
    sentences = (*first, *caveats(results, entries))
    is_new = best is not None and best.quality is None
    build = command_from_case(best.row.case, plan.spec_file) if best and best.row and is_new else None
    return Advice(entries, plan.limits, sentences, model_text(plan), build)


def model_text(plan: Plan) -> str:
    """What is measured: `one attention layer (width 256, 4 heads), 1 × 32,768 tokens, fp32`."""
    case = plan.cases[0]
    model = model_of_case(case)
    name = f"an encoder of {counted(model.layers, 'layer')}" if case.scope == "encoder" else "one attention layer"
    size = f"width {model.attention.dim}, {counted(model.attention.heads, 'head')}"
    return f"{name} ({size}), {case.batch} × {case.seq_len:,} tokens, {case.precision}"


def ranked(results: BenchResults, plan: Plan) -> tuple[Entry, ...]:
    """All candidates, the best first. The one with the lowest loss that fits is to be used; if none of those that fit
    was judged, the fastest, if no disturbed one could be faster."""
    rows = {(row.case.label, row.case.runtime): row for row in results.rows if row.case.model_seq_len is None}
    entries = with_frontier(
        [
            replace(
                entry_of(case, rows.get((case.label, case.runtime)), plan.limits),
                quality=plan.quality.get((case.label, case.runtime)),
            )
            for case in plan.cases
        ]
    )
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
    """What to use; if disturbed rows leave that open, what fits, or without any limit what is the fastest so far.

    With --quality, the frontier.
    """
    assert best.row is not None
    assert best.row.timing is not None
    limits, timing = plan.limits, best.row.timing
    (seq_len,) = plan.grid.seq_lens
    within = f", within {limits.text}" if limits.text else ""
    measured = f"{best.figures} for {seq_len:,} tokens, measured on this machine{within}."
    if best.quality is not None:
        yield from sentences_of_frontier(entries, seq_len, limits.text)
    elif best.standing == "use this":
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
    if on_frontier(entries):
        yield OTHER_WEIGHTS
    elif sum(entry.latency_ms is not None for entry in entries) > 1:
        yield OTHER_MODELS
    if any(entry.latency_ms is not None for entry in entries):
        yield from bfloat16_here(entries)


def bfloat16_here(entries: Sequence[Entry]) -> Iterator[str]:
    """That a variant which may be computed in bfloat16 is faster so, where the processor has tiles for it and the
    runtime that uses them is installed."""
    able = [entry.label for entry in entries if entry.label.partition(",")[0].partition("-")[0] in BFLOAT16_VARIANTS]
    if able and Processor.here().has_bfloat16_tiles and BFLOAT16_RUNTIME.package.version is not None:
        yield BFLOAT16_HERE.format(", ".join(dict.fromkeys(able)))
