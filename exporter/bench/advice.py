"""`bench --advise`: measure what an advice needs in little time, in the three steps of docs/benchmarks.md.

The quality of candidates comes from results of `effexport evaluate`, matched with the models that are timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from effexport.base.environment import usable_cores
from effexport.base.errors import UserError
from effexport.base.formatting import duration, listed, memory
from effexport.base.records import read_record
from effexport.base.runtimes import RUNTIMES
from effexport.base.spec import SCOPES, BuildSpec
from effexport.bench import costs
from effexport.bench.grid import BenchCase, BenchResults, BenchRow, Grid, Model, OnStep
from effexport.bench.run import Bench, bench
from effexport.bench.timing import MOST_DISTURBED, Settings, TimedCall
from effexport.models.attention_spec import SHARED_FIELDS, field_names
from effexport.models.contract import ModelContract
from effexport.models.shapes import Product
from effexport.models.validation import SpecError
from effexport.report.wording import interval_text
from effexport.tasks.figures import BITS, LANGUAGE, LOSS, Estimate, Evaluation


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a call may take, in milliseconds and in bytes; None for no limit."""

    latency_ms: float | None = None
    memory_bytes: int | None = None

    @property
    def text(self) -> str:
        """`200 ms and 1.00 GB`; "" without limits."""
        latency = [] if self.latency_ms is None else [duration(self.latency_ms)]
        return listed(latency + ([] if self.memory_bytes is None else [memory(self.memory_bytes)]))


# A probe times a case at this part of the length. Up to SHORTEST_PROBED tokens, no variant takes long enough.
PROBE_PART, SHORTEST_PROBED = 8, 2048
PROBE_ROUNDS = 3
# The shortest of a probe's runs varies, from 34 to 40 ms in seven runs. Only what misses the limit by more is left out.
MARGIN = 1.25
# What would take less than this at the full length is measured there: leaving it out would save little, and at such
# lengths the fixed part of a call, which does not grow with the length, counts.
WORTH_LEAVING_OUT_MS = 100.0
# Without a latency limit, what would take this many times as long as the fastest model is left out.
TIMES_FASTEST = 10.0
# Kernels that work in tiles need down to half the time that the same products need in torch.matmul.
SHARE_OF_PRODUCTS = 0.5


@dataclass(frozen=True, kw_only=True)
class AdvicePlan:
    """The measurements for an advice. grid: of one length, batch and precision.

    refused: the reasons variants cannot be the described model, by variant. spec_file: its description, or "".
    quality: the known quality of candidates, by label and runtime.
    """

    grid: Grid
    limits: Limits = field(default_factory=Limits)
    refused: Mapping[str, str] = field(default_factory=dict)
    spec_file: str = ""
    quality: Mapping[tuple[str, str], CandidateQuality] = field(default_factory=dict)

    @property
    def models(self) -> tuple[tuple[BenchCase, ...], ...]:
        """The cases of each model on all runtimes; the model that should be fastest comes first."""
        models = [tuple(cases) for _, cases in itertools.groupby(self.grid.cases(), key=lambda case: case.label)]
        return tuple(sorted(models, key=lambda cases: min(map(costs.call_seconds, cases))))

    @property
    def cases(self) -> tuple[BenchCase, ...]:
        return tuple(case for model in self.models for case in model)

    @property
    def probed_length(self) -> int | None:
        """The length at which every model is timed first; None if the full length is short."""
        (seq_len,) = self.grid.seq_lens
        return seq_len // PROBE_PART if seq_len > SHORTEST_PROBED else None

    def probes(self, cases: Iterable[BenchCase]) -> list[BenchCase]:
        """The same models, made for the same length, with shorter inputs; none if the full length is short."""
        length = self.probed_length
        return [replace(case, seq_len=length, model_seq_len=case.seq_len) for case in cases] if length else []

    def longest_ms(self, fastest_ms: float) -> float:
        """The time above which a case need not be measured. fastest_ms: of the models measured so far, or infinite."""
        return TIMES_FASTEST * fastest_ms if self.limits.latency_ms is None else self.limits.latency_ms

    def seconds(self, settings: Settings) -> float:
        """Roughly how long all of it takes."""
        longest_ms = self.longest_ms(1e3 * min(map(costs.call_seconds, self.cases)))
        speed = costs.FLOPS_PER_CORE * usable_cores()
        tried = [case for case in self.cases if not misses(least_ms_by_products(case, speed), longest_ms)]
        probes, full = (
            [case for case in cases if costs.reason_too_large(case) is None] for cases in (self.probes(tried), tried)
        )
        if self.probed_length is not None:
            full = [case for case in full if not misses(1e3 * costs.call_seconds(case), longest_ms)]
        exports = {(case.label, case.runtime) for case in (*probes, *full) if RUNTIMES[case.runtime].graph}
        measured = costs.measuring_cost(probes, of_probes(settings)) + costs.measuring_cost(full, settings)
        return costs.START_SECONDS + costs.EXPORT_SECONDS * len(exports) + measured


def of_probes(settings: Settings) -> Settings:
    """The settings of probes, which only time: parity and memory are those of the full length."""
    return replace(settings, rounds=PROBE_ROUNDS, parity=False, memory=False)


def least_ms_by_products(case: BenchCase, flops_per_second: float) -> float:
    """A lower bound on the time of a case's matrix products, on a CPU with this speed in float32.

    0 for lower precisions, and for GPUs: their matrix units are several times faster.
    """
    if case.precision != "fp32" or RUNTIMES[case.runtime].device != "cpu":
        return 0.0
    return SHARE_OF_PRODUCTS * 1e3 * case.flops / flops_per_second


def misses(least_ms: float, longest_ms: float) -> bool:
    """True if a case that takes at least this long need not be measured."""
    return least_ms > max(WORTH_LEAVING_OUT_MS, MARGIN * longest_ms)


# A product that is large enough to reach the processor's speed; it takes about 20 ms per core.
LARGE_PRODUCT, SPEED_ROUNDS, SPEED_SECONDS = Product(1, 1024, 1024, 1024), 3, 1.0


def advise(plan: AdvicePlan, settings: Settings, on_step: OnStep = lambda step: None) -> BenchResults:
    """Carry out a plan. The rows of the full length and of probes, also of an interrupted run."""
    seconds = plan.seconds(settings)
    return bench(plan.grid, settings, on_step, measure=lambda running: Adviser(running, plan).run(), seconds=seconds)


@dataclass
class Adviser:
    """A plan that is being carried out. bench: what measures and keeps the rows."""

    bench: Bench
    plan: AdvicePlan

    def run(self) -> None:
        self.bench.pace.say("measuring the speed of matrix products")
        speed, is_disturbed = speed_of_products(self.bench)
        basis = ("its matrix products alone", f"{speed / 1e9:.0f} GFLOP/s of torch.matmul", is_disturbed)
        for cases in self.plan.models:
            left = [case for case in cases if not self.leaves_out(case, least_ms_by_products(case, speed), *basis)]
            probes = self.probe(left)
            self.bench.size([case for case in left if not self.leaves_out_by_probe(case, probes.get(case.runtime))])

    def probe(self, cases: Sequence[BenchCase]) -> dict[str, BenchRow]:
        """The rows of these cases of one model at a shorter length, by runtime."""
        settings, done = self.bench.settings, len(self.bench.rows)
        self.bench.settings = of_probes(settings)
        self.bench.size(self.plan.probes(cases))
        self.bench.settings = settings
        # what cannot run says so again at the full length
        self.bench.rows[done:] = [row for row in self.bench.rows[done:] if row.timing is not None]
        return {row.case.runtime: row for row in self.bench.rows[done:]}

    def leaves_out_by_probe(self, case: BenchCase, probe: BenchRow | None) -> bool:
        """True if a case would miss the limit even if its time grew only linearly with its length."""
        if probe is None or probe.timing is None:
            return False
        short_ms, length = probe.timing.lowest_ms, probe.case.seq_len
        source = f"{duration(short_ms)} for {length:,} tokens"
        return self.leaves_out(case, short_ms * case.seq_len / length, "it", source, not probe.is_quotable)

    def leaves_out(self, case: BenchCase, least_ms: float, what: str, source: str, is_disturbed: bool) -> bool:
        """Add a row that is not run if the case misses the limit by far.

        source: what `least_ms` was extrapolated from. is_disturbed: by other programs, so it is too long.
        """
        if is_disturbed:
            least_ms /= MOST_DISTURBED
            source += f", {MOST_DISTURBED} times as fast because other programs disturbed that"
        if not misses(least_ms, self.plan.longest_ms(self.fastest_ms)):
            return False
        reason = f"left out: {what} would take at least {duration(least_ms)}, extrapolated from {source}"
        self.bench.rows.append(BenchRow(case=case, status="not run", reason=reason))
        self.bench.pace.say(f"{case.title}: left out")
        return True

    @property
    def fastest_ms(self) -> float:
        """Of the full length, within the memory limit; infinite if nothing was timed so far."""
        limit = self.plan.limits.memory_bytes
        full = (row for row in self.bench.rows if row.case.model_seq_len is None)
        fits = [row for row in full if limit is None or row.peak_bytes is None or row.peak_bytes <= limit]
        return min((row.timing.median_ms for row in fits if row.timing), default=math.inf)


def speed_of_products(bench: Bench) -> tuple[float, bool]:
    """Operations per second of a large product in float32, with all threads; and whether others disturbed that."""
    call = TimedCall("products", costs.run_products([LARGE_PRODUCT]), "torch")
    rotation = bench.rotation([call], SPEED_ROUNDS, SPEED_SECONDS)
    rotation.run()
    seconds = min(rotation.used_rounds(call.name).values())
    return LARGE_PRODUCT.flops / seconds, not rotation.samples[call.name]


EXPECTED = "expected what `effexport evaluate ARTIFACT --data FILE -o FILE.json` writes"


@dataclass(frozen=True)
class Judged:
    """A result of `effexport evaluate`, from a file, and the spec of the model that was judged."""

    path: Path
    found: Evaluation
    spec: BuildSpec

    @property
    def described(self) -> dict[str, Any]:
        """The description of the model as in a spec file, apart from the fields of its variant."""
        attention = {name: getattr(self.spec.attention, name) for name in sorted(SHARED_FIELDS)}
        if attention["bias"] == type(self.spec.attention).bias:
            del attention["bias"]  # each variant has its own default
        model = self.spec.model
        return {"scope": model.scope, "precision": self.spec.precision, **attention, **model.around_attention}

    def candidate(self, options: Collection[str]) -> Model:
        """The model as a candidate. options: the names of those that a spec file sets for all candidates."""
        attention = self.spec.attention
        own = (name for name in field_names(type(attention)) if name in options and name not in SHARED_FIELDS)
        given = {name: getattr(attention, name) for name in own}
        return Model(attention.variant, attention.changed | given, attention.label)


@dataclass(frozen=True)
class CandidateQuality:
    """Quality of a candidate. loss: bits per byte if known, else nats per answer. model: the one that was judged."""

    loss: Estimate
    model: str

    @property
    def text(self) -> str:
        """`2.1034 bits per byte (2.0812 to 2.1256)`."""
        value, space, interval = interval_text(self.loss).partition(" ")
        return f"{value} {self.unit}{space}{interval}"

    @property
    def unit(self) -> str:
        return BITS if self.loss.name == BITS else "nats per answer"


def judged_from_files(paths: Iterable[Path]) -> tuple[Judged, ...]:
    """The results in files and folders. Raises UserError for other files, and unless all are of the same answers."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found:
            raise UserError(f"--quality {path}: there is no .json in this folder; {EXPECTED}")
        files += found
    results = tuple(judged_from_json(file) for file in files)
    first = results[0]
    for one in results[1:]:
        if answers_of(one.found) != answers_of(first.found):
            raise UserError(
                f"{first.path} and {one.path} cannot be compared: {told(first.found)}; {told(one.found)}; expected the "
                "same data: evaluate both with the same --data, --window, --stride, --rows and --seed"
            )
    return results


def judged_from_json(path: Path) -> Judged:
    found = read_record(path, Evaluation, EXPECTED)
    try:
        spec = BuildSpec.from_dict(found.spec)
        figures = [end for one in found.estimates for end in (one.value, one.low, one.high) if end is not None]
        if LOSS not in {one.name for one in found.estimates} or not all(map(math.isfinite, figures)):
            raise ValueError("a loss and finite figures are missing")
    except (ValueError, OverflowError, SpecError, KeyError, TypeError) as error:
        raise UserError(f"cannot read --quality {path}; {EXPECTED}: {error}") from error
    if spec.model.scope not in SCOPES:
        raise UserError(
            f"--quality {path} judged {spec.model.title}, a checkpoint or a module; --advise times models that "
            "`effexport build --variant` describes: leave this result out"
        )
    return Judged(path, found, spec)


def answers_of(found: Evaluation) -> tuple[object, ...]:
    """A key that two results share if they are about the same answers."""
    return found.objective, found.data_sha256, found.rows, found.answers


def told(found: Evaluation) -> str:
    return f"{found.objective} on {found.data} (SHA-256 {found.data_sha256[:8]}…), {found.answers:,} answers"


def quality_of_cases(cases: Sequence[BenchCase], results: Sequence[Judged]) -> dict[tuple[str, str], CandidateQuality]:
    """The quality of candidates by label and runtime: a result in the same runtime, else one in another runtime.

    Raises UserError for a result of a model that is not timed, and for two of one model in one runtime.
    """
    found: dict[str, dict[str, Judged]] = {}
    for one in results:
        label, runtime = matching(cases, one).label, one.found.runtime
        other = found.setdefault(label, {}).setdefault(runtime, one)
        if other is not one:
            raise UserError(
                f"{other.path} and {one.path} both are results of {label} on {runtime}; expected one: leave one out"
            )
    has_bits = all(BITS in {estimate.name for estimate in one.found.estimates} for one in results)
    quality = {}
    for case in cases:
        of_label = found.get(case.label, {})
        judged = of_label.get(case.runtime) or next(iter(of_label.values()), None)
        if judged is not None:
            loss = judged.found.figure(BITS if has_bits else LOSS)
            quality[case.label, case.runtime] = CandidateQuality(loss, judged.found.model)
    return quality


def matching(cases: Sequence[BenchCase], one: Judged) -> BenchCase:
    """The case whose model was judged. Raises UserError, with what differs, if there is none."""
    alike = [case for case in cases if case.variant == one.spec.attention.variant]
    if not alike:
        known = "; ".join(dict.fromkeys(case.label for case in cases))
        raise UserError(
            f"{one.path} judged {one.found.label}, which is not among the candidates: {known}; leave this result out, "
            "or --variants, so that all models that were judged are candidates"
        )
    closest = min(alike, key=lambda case: len(differences(case, one)))
    found = differences(closest, one)
    if found:
        judged, timed = (listed([f"{name} {pair[n]}" for name, pair in found.items()]) for n in (0, 1))
        raise UserError(
            f"{one.path} judged {one.found.label} with {judged}, but --advise times it with {timed}; time the model "
            "that was judged, or evaluate the one that is timed"
        )
    return closest


def differences(case: BenchCase, one: Judged) -> dict[str, tuple[object, object]]:
    """By name, what was judged and what is timed, where the two differ."""
    judged, timed = facts(one.spec.model), facts(case.model)
    pairs = {name: (judged.get(name), timed.get(name)) for name in judged | timed}
    pairs["precision"] = (one.found.precision, case.precision)
    # a text is cut into windows, and other rows are as long as they are
    tokens = one.found.tokens if one.found.objective in LANGUAGE else max(one.found.tokens, case.seq_len)
    pairs["tokens per row"] = (tokens, case.seq_len)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def facts(model: ModelContract) -> dict[str, object]:
    """The fields of a model, flat; two specs of the same model have the same ones."""
    attention = model.attention
    found = {"scope": model.scope, **attention.to_dict(), **model.around_attention}
    # as if they were not given
    if attention.inner_dim == attention.dim:
        found["head_dim"] = None
    if found.get("ff_dim") == 4 * attention.dim:
        found["ff_dim"] = None
    return found
