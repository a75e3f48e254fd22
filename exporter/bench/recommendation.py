"""The rows of a plan as advice: what to use, how to get it, and why everything else fell out; in sentences, as a table
and a plot, and in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from effexport.base.formatting import NOTHING, Word, command_line, counted, duration, listed, memory, three_digits
from effexport.base.machine import Processor
from effexport.base.option_fields import options_of, words_of
from effexport.base.runtimes import CPU, RUNTIMES
from effexport.base.spec import BUILD_FIELDS, ENCODER_FIELDS, options_from_toml
from effexport.bench.findings import median_text
from effexport.bench.grid import BenchCase, BenchResults, BenchRow
from effexport.bench.timing import MOST_DISTURBED
from effexport.models.attention_spec import field_names
from effexport.options import BuildOptions
from effexport.render.document import Chart, Code, Column, Line, Part, Table, present
from effexport.render.svg import (
    PANEL_WIDTH,
    Axis,
    Figure,
    Point,
    Series,
    legend_of,
    scatter,
    ticks_around,
    ticks_between,
)
from effexport.report.wording import interval_text

if TYPE_CHECKING:
    from effexport.bench.advice import AdvicePlan, CandidateQuality, Limits

Standing = Literal[
    "use this",
    "frontier",
    "fits",
    "–",
    "memory unknown",
    "disturbed",
    "over the limit",
    "not measured",
    "failed",
    "not reached",
]
# The order of the table. Without any limit, "–" stands for "fits". "frontier" fits too: with --quality, no other one
# that fits is both faster and better.
STANDINGS: tuple[Standing, ...] = get_args(Standing)
FITTING: tuple[Standing, ...] = ("use this", "frontier", "fits", "–")


@dataclass(frozen=True)
class AdviceEntry:
    """One candidate of an advice. row: its measurement at the full length, or None. why: its standing in words.

    quality: None if it was not judged.
    """

    label: str
    runtime: str
    standing: Standing
    why: str = ""
    row: BenchRow | None = None
    quality: CandidateQuality | None = None

    @property
    def name(self) -> str:
        return f"{self.label} on {self.runtime}"

    @property
    def latency_ms(self) -> float | None:
        return None if self.row is None else self.row.median_ms

    @property
    def takes_ms(self) -> float:
        """Its latency, to compare; infinite if it was not timed."""
        return math.inf if self.latency_ms is None else self.latency_ms

    @property
    def latency(self) -> str:
        return NOTHING if self.row is None else median_text(self.row)

    @property
    def peak_bytes(self) -> int | None:
        return None if self.row is None else self.row.peak_bytes

    @property
    def lost(self) -> float:
        """The loss; infinite if it was not judged."""
        return math.inf if self.quality is None else self.quality.loss.value

    @property
    def loss(self) -> str:
        """`2.1034 (2.0812 to 2.1256)`: with its 95 % confidence interval."""
        return NOTHING if self.quality is None else interval_text(self.quality.loss)

    @property
    def is_disturbed(self) -> bool:
        """True if its timing is too long because of other programs."""
        return self.row is not None and self.row.timing is not None and not self.row.is_quotable

    @property
    def figures(self) -> str:
        """`182 ms and 392 MB`, as far as they are known."""
        return listed([duration(self.latency_ms)] + ([] if self.peak_bytes is None else [memory(self.peak_bytes)]))


NO_DIFFERENCE = (
    "Where intervals overlap or are unknown, these results show no difference; `effexport evaluate ARTIFACT --compare "
    "OTHER` compares two models row by row, which tells more."
)
OTHER_WEIGHTS = "The timed models have the sizes of those that were judged, but other weights."


def with_frontier(entries: Sequence[AdviceEntry]) -> list[AdviceEntry]:
    """The entries with the frontier marked. The one with the lowest loss is to be used, unless one with a lower loss
    may fit that other programs disturbed."""
    fitting = [entry for entry in entries if entry.quality is not None and entry.standing in FITTING]
    best = min(fitting, key=lambda entry: (entry.lost, entry.takes_ms), default=None)
    if best is None:
        return list(entries)
    unsure = [entry for entry in entries if entry.quality is not None and entry.standing == "disturbed"]
    is_sure = all(entry.lost > best.lost for entry in unsure)
    timed = sorted((entry for entry in fitting if not entry.is_disturbed), key=lambda entry: entry.takes_ms)

    def placed(entry: AdviceEntry) -> AdviceEntry:
        if entry is best:
            return replace(entry, standing="use this" if is_sure else "frontier")
        if entry not in timed:
            return entry
        better = next((other for other in timed if beats(other, entry)), None)
        return replace(entry, standing="frontier") if better is None else replace(entry, why=f"beaten by {better.name}")

    return [placed(entry) for entry in entries]


def beats(one: AdviceEntry, other: AdviceEntry) -> bool:
    """True if one of two timed and judged entries is at least as good in latency and in loss, and better in one."""
    first, second = ((entry.takes_ms, entry.lost) for entry in (one, other))
    return first[0] <= second[0] and first[1] <= second[1] and first != second


def on_frontier(entries: Sequence[AdviceEntry]) -> list[AdviceEntry]:
    """The frontier, the lowest loss first."""
    found = [entry for entry in entries if entry.quality is not None and entry.standing in ("use this", "frontier")]
    return sorted(found, key=lambda entry: entry.lost)


def sentences_of_frontier(entries: Sequence[AdviceEntry], seq_len: int, limits: str) -> Iterator[str]:
    """The lowest loss, then what each faster model of the frontier loses."""
    best, *faster = on_frontier(entries)
    assert best.quality is not None
    within = f" within {limits}" if limits else ""
    yield (
        f"{best.name} has the lowest loss{within}: {best.quality.text}, with {best.figures} for {seq_len:,} tokens, "
        f"measured on this machine. It was judged as {best.quality.model}."
    )
    if best.standing != "use this":
        yield "A model with a lower loss may fit, too: other programs disturbed its timing."
    for entry in faster:
        yield f"{entry.name} {beside(entry, best)}."
    rivals = [entry for entry in entries if entry.quality is not None and entry.standing in FITTING]
    if not faster and len(rivals) > 1 and not any(entry.is_disturbed for entry in rivals):
        yield "No other model that fits and was judged is faster."
    if any(are_alike(best, entry) for entry in faster):
        yield NO_DIFFERENCE
    if unknown := sum(entry.quality is None and entry.standing in FITTING for entry in entries):
        yield f"{counted(unknown, 'model')} without a result cannot be placed."


def beside(entry: AdviceEntry, best: AdviceEntry) -> str:
    """`is 2.10 times as fast and loses 0.12 bits per byte`; its time alone if that of the other is not known."""
    speed = f"is {three_digits(best.takes_ms / entry.takes_ms)} times as fast"
    if best.is_disturbed:
        speed = f"takes {duration(entry.latency_ms)}"
    assert entry.quality is not None
    if are_alike(entry, best):
        return f"{speed} and shows no difference in loss"
    return f"{speed} and loses {entry.lost - best.lost:.2g} {entry.quality.unit}"


def are_alike(one: AdviceEntry, other: AdviceEntry) -> bool:
    """True if the confidence intervals of the losses overlap, or one of them is unknown."""
    ends = [entry.quality.loss.interval for entry in (one, other) if entry.quality is not None]
    return not all(ends) or max(low for low, _ in ends) <= min(high for _, high in ends)


# The file for fields that have no option of their own, if the user gave none.
WRITTEN_FILE = "model.toml"


@dataclass(frozen=True)
class BuildCommand:
    """A command, and how `file`, which it reads, must be changed first: lines to add, and fields to remove."""

    text: str
    file: str = ""
    lines: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()

    @property
    def before(self) -> str:
        """Changes to the spec file that come first, as a sentence; "" if there are none."""
        add = f"write these lines to {self.file}: {'; '.join(self.lines)}" if self.lines else ""
        remove = f"remove {', '.join(self.remove)} from {self.file}, which this variant does not have"
        steps = [step for step in (add, remove if self.remove else "") if step]
        return f"First {' and '.join(steps)}." if steps else ""


def command_from_case(case: BenchCase, spec_file: str = "") -> BuildCommand | None:
    """The command that exports the model of a case; None if its runtime does not run an export of ours.

    spec_file: the TOML file that described the model, or "".
    """
    runtime = RUNTIMES[case.runtime]
    if runtime.graph != "ours":
        return None
    given = options_from_toml(Path(spec_file)) if spec_file else {}
    attention = case.model.attention
    values: dict[str, Any] = {"variant": case.variant, "scope": case.scope, "dim": attention.dim}
    values |= {"heads": attention.heads, "seq_len": case.seq_len}
    values |= {"batch": case.batch} if case.batch != given.get("batch", 1) else {}
    values |= {"precision": case.precision} if case.precision != given.get("precision", "fp32") else {}
    values |= {"targets": [case.runtime]} if runtime.engine else {}
    own = {name: value for name, value in (case.options | case.encoder).items() if name not in values}
    values |= {name: value for name, value in own.items() if name not in given or given[name] != value}
    options = options_of(BuildOptions)
    in_file = (name for name in values if name not in options or not options[name].flags)
    lines = tuple(f"{name} = {json.dumps(values[name])}" for name in in_file)
    file = spec_file or (WRITTEN_FILE if lines else "")
    words: list[Word] = ["effexport", "build", *(("--spec", Path(file)) if file else ())]
    known = {"variant", *BUILD_FIELDS, "scope", *ENCODER_FIELDS, *field_names(type(attention))}
    remove = tuple(name for name in given if name not in known)
    return BuildCommand(command_line(*words, *words_of(BuildOptions, values)), file, lines, remove)


OTHER_MODELS = (
    "The variants are different models, not implementations of one model: they cannot share weights, so this is a "
    "choice to make before training."
)
NOTHING_MEASURED = "Nothing was measured, so there is no advice; the table says why."
BFLOAT16_HERE = (
    "This processor multiplies bfloat16 faster than float32: repeat this with --precision bf16, which rounds the "
    "factors of linear layers and nothing else."
)
DISTURBED = "Other programs disturbed {}; repeat this on an idle machine, or with --wait-idle."


@dataclass(frozen=True)
class Advice:
    """The candidates, the best first. sentences: what to do, then caveats. model: what was measured.

    build: how to get the recommended one; None if nothing is recommended, or there is nothing to build, as for a model
    that was judged.
    """

    entries: tuple[AdviceEntry, ...]
    limits: Limits
    sentences: tuple[str, ...]
    model: str
    build: BuildCommand | None

    @property
    def figure(self) -> str:
        """The name of the losses: bits per byte, or loss; "" without any."""
        return next((entry.quality.loss.name for entry in self.entries if entry.quality is not None), "")


def advice_from_results(results: BenchResults, plan: AdvicePlan) -> Advice:
    """The advice that the rows of a plan support; those of shorter lengths are not ranked."""
    entries = ranked(results, plan)
    measured = any(row.timing is not None for row in results.rows)
    best = next(iter(on_frontier(entries)), None) or next((one for one in entries if one.standing in FITTING), None)
    first = sentences_of_best(best, entries, plan) if best else sentences_of_none(entries, plan, measured=measured)
    sentences = (*first, *caveats(results, entries))
    is_new = best is not None and best.quality is None
    build = command_from_case(best.row.case, plan.spec_file) if best and best.row and is_new else None
    return Advice(entries, plan.limits, sentences, model_text(plan), build)


def model_text(plan: AdvicePlan) -> str:
    """The measured model: `one attention layer (width 256, 4 heads), 1 × 32,768 tokens, fp32`."""
    case = plan.cases[0]
    model = case.model
    name = f"an encoder of {counted(model.layers, 'layer')}" if case.scope == "encoder" else "one attention layer"
    size = f"width {model.attention.dim}, {counted(model.attention.heads, 'head')}"
    return f"{name} ({size}), {case.batch} × {case.seq_len:,} tokens, {case.precision}"


def ranked(results: BenchResults, plan: AdvicePlan) -> tuple[AdviceEntry, ...]:
    """All candidates, the best first. The one with the lowest loss that fits is to be used; if none of those that fit
    was judged, the fastest, if no disturbed one could be faster."""
    rows = {(row.case.label, row.case.runtime): row for row in results.rows if row.case.model_seq_len is None}
    found = []
    for case in plan.cases:
        row, quality = rows.get((case.label, case.runtime)), plan.quality.get((case.label, case.runtime))
        found.append(AdviceEntry(case.label, case.runtime, *judged(row, plan.limits), row, quality))
    entries = with_frontier(found)
    entries += [AdviceEntry(variant, "–", "not measured", reason) for variant, reason in plan.refused.items()]
    entries.sort(key=lambda entry: (STANDINGS.index(entry.standing), entry.is_disturbed, entry.takes_ms))
    best = entries[0]
    # none that was disturbed, the best one included, could be faster than that
    is_fastest = all(one.takes_ms / MOST_DISTURBED > best.takes_ms for one in entries if one.is_disturbed)
    if best.standing in ("fits", "–") and is_fastest:
        entries[0] = replace(best, standing="use this")
    return tuple(entries)


def judged(row: BenchRow | None, limits: Limits) -> tuple[Standing, str]:
    """The standing of a row, with a reason. A disturbed time is too long: it proves a fit, never a miss."""
    if row is None:
        return "not reached", "interrupted before it was measured"
    if row.timing is None:
        return "failed" if row.status == "failed" else "not measured", row.reason
    late = over_limit("latency", row.timing.median_ms, limits.latency_ms)
    large = over_limit("memory", row.peak_bytes, limits.memory_bytes)
    disturbed, unknown = "" if row.is_quotable else f"disturbed: {row.reason}", ""
    standing: Standing = "fits" if limits.text else "–"
    if late or large:
        standing = "over the limit" if row.is_quotable or large else "disturbed"
    elif limits.memory_bytes is not None and row.peak_bytes is None:
        standing, unknown = "memory unknown", row.note or "its memory was not measured"
    return standing, "; ".join(filter(None, (late, large, unknown, disturbed)))


def over_limit(name: str, value: float | None, limit: float | None) -> str:
    """`latency 1.50 times the limit`; "" if it is within the limit, or one of the two is unknown."""
    if value is None or limit is None or value <= limit:
        return ""
    return f"{name} {three_digits(value / limit)} times the limit"


def sentences_of_best(best: AdviceEntry, entries: Sequence[AdviceEntry], plan: AdvicePlan) -> Iterator[str]:
    """The model to use; if disturbed rows leave that open, one that fits, or without limits the fastest so far.

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


def sentences_of_none(entries: Sequence[AdviceEntry], plan: AdvicePlan, *, measured: bool) -> Iterator[str]:
    """The reason there is nothing to recommend, and the closest candidate."""
    best: dict[Standing, AdviceEntry] = {entry.standing: entry for entry in reversed(entries)}
    if not measured:
        yield NOTHING_MEASURED
    elif unknown := best.get("memory unknown"):
        yield f"{unknown.name} is fast enough with {unknown.figures}, but its memory is unknown."
    elif disturbed := best.get("disturbed"):
        yield f"No conclusion: {disturbed.name} took {duration(disturbed.latency_ms)}, but it was disturbed."
    else:
        (seq_len,) = plan.grid.seq_lens
        reached = "None of the models so far" if "not reached" in best else "No model"
        what = f"meets {plan.limits.text}" if plan.limits.text else "was timed"
        yield f"{reached} {what} for {seq_len:,} tokens on this machine."
        if over := best.get("over the limit"):
            yield f"The fastest that was measured is {over.name} with {over.figures}."


def caveats(results: BenchResults, entries: Sequence[AdviceEntry]) -> Iterator[str]:
    if disturbed := sum(entry.is_disturbed for entry in entries):
        yield DISTURBED.format(counted(disturbed, "measurement"))
    if not results.complete:
        missing = sum(entry.standing == "not reached" for entry in entries)
        yield f"Interrupted: {counted(missing, 'candidate was', 'candidates were')} not measured."
    if on_frontier(entries):
        yield OTHER_WEIGHTS
    elif sum(entry.latency_ms is not None for entry in entries) > 1:
        yield OTHER_MODELS
    here, timed = Processor.here(), [entry.row.case for entry in entries if entry.row and entry.row.timing]
    is_float = any(case.precision == "fp32" and RUNTIMES[case.runtime].provider == CPU for case in timed)
    if is_float and (here.has_bfloat16_products or here.has_bfloat16_tiles):
        yield BFLOAT16_HERE


def parts_of_advice(advice: Advice, note: str) -> tuple[Part, ...]:
    """Its limits, how to get the recommended model, and all candidates."""
    limits = f"Limits: {advice.limits.text}" if advice.limits.text else "No limits were given"
    build = advice.build
    return present(
        f"{limits}. Measured: {advice.model}, without padding.",
        build.before if build else None,
        Code(build.text) if build else None,
        candidates_table(advice, note),
        frontier_chart(advice),
    )


def candidates_table(advice: Advice, note: str) -> Table:
    figures = [Column("Latency", True), Column("Memory", True)]
    figures += [Column(advice.figure.capitalize(), True)] if advice.figure else []
    columns = (Column("Model"), Column("Runtime"), *figures, Column("Standing"), Column("Why"))
    lines = []
    for entry in advice.entries:
        loss = [entry.loss] if advice.figure else []
        cells = (entry.label, entry.runtime, entry.latency, memory(entry.peak_bytes), *loss, entry.standing, entry.why)
        lines.append(Line(cells))
    return Table("Candidates", columns, tuple(lines), note)


def frontier_chart(advice: Advice) -> Chart | None:
    """Loss against latency, with the frontier as a line; None unless two candidates were timed and judged."""
    points: dict[str, Point] = {}
    for entry in advice.entries:
        if entry.latency_ms is None or entry.quality is None or entry.is_disturbed:
            continue
        label = f"{entry.name}: {entry.latency}, {entry.quality.text}"
        points[entry.name] = Point(entry.latency_ms, entry.lost, label, entry.quality.loss.interval)
    if len(points) < 2:
        return None
    frontier = [points[entry.name] for entry in on_frontier(advice.entries) if entry.name in points]
    line = Series("frontier", [replace(point, interval=()) for point in frontier], "baseline")
    runtimes = {entry.runtime for entry in advice.entries}
    names = {entry.name: entry.name if len(runtimes) > 1 else entry.label for entry in advice.entries}
    series = [line, *(Series(names[name], [point]) for name, point in points.items())]
    title = f"Frontier of latency against {advice.figure}"
    caption = f"On the frontier: {'; '.join(point.label for point in frontier)}."
    x = Axis("milliseconds", True, ticks_between(point.x for point in points.values()))
    y = Axis(advice.figure, ticks=ticks_around(y for point in points.values() for y in (point.y, *point.interval)))
    svg = scatter("frontier", title, caption, x, y, series, PANEL_WIDTH)
    return Chart(legend_of(series), {"": [Figure(title, caption, svg)]})


def json_of_advice(advice: Advice) -> dict[str, Any]:
    """The advice as it stands in the object of --json."""
    frontier = on_frontier(advice.entries)
    return {
        "limits": asdict(advice.limits),
        "sentences": list(advice.sentences),
        "build": None if advice.build is None else advice.build.text,
        "before_build": "" if advice.build is None else advice.build.before,
        "candidates": [
            {name: getattr(entry, name) for name in ("label", "runtime", "standing", "why")}
            | {"median_ms": entry.latency_ms, "peak_bytes": entry.peak_bytes}
            | {"loss": entry.quality and asdict(entry.quality.loss), "judged": entry.quality and entry.quality.model}
            | {"on_frontier": entry in frontier}
            for entry in advice.entries
        ],
    }
