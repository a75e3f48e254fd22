"""Measure what an advice needs in little time: cheap models first, and no model that would clearly miss a limit.

Two bounds leave a model out before its full length is measured. Its matrix products alone take at least half of what
`torch.matmul` needs for them, and a call takes at least as many times longer than a short one as its input is longer.
What other programs disturbed counts as if it had taken a fraction of its time. A row that is left out says so and has
no timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from effexport.bench.advice import MOST_DISTURBED, PROBE_ROUNDS, Plan, least_ms_by_products, misses, probe_of
from effexport.bench.costs import OnStep, run_products
from effexport.bench.results import BenchResults, Case, Row
from effexport.bench.run import Bench, Settings, bench, describe
from effexport.bench.timing import Rotation, TimedCall
from effexport.models.shapes import Product
from effexport.units import duration

# A product that is large enough to reach the processor's speed; it takes about 20 ms per core.
LARGE_PRODUCT, SPEED_ROUNDS, SPEED_SECONDS = Product(1, 1024, 1024, 1024), 3, 1.0


def advise(plan: Plan, settings: Settings, on_step: OnStep = lambda step: None) -> BenchResults:
    """Carry out a plan. The rows of the full length and of probes, also of an interrupted run."""
    seconds = plan.seconds(settings.rounds, settings.max_seconds)
    return bench(plan.grid, settings, on_step, measure=lambda running: Adviser(running, plan).run(), seconds=seconds)


@dataclass
class Adviser:
    """A plan that is being carried out. bench: what measures and keeps the rows."""

    bench: Bench
    plan: Plan

    def run(self) -> None:
        self.bench.pace.say("measuring the speed of matrix products")
        speed = speed_of_products(self.bench)
        for cases in self.plan.models:
            left = [case for case in cases if not self.leaves_out_by_products(case, speed)]
            probes = self.probe(left)
            self.bench.size([case for case in left if not self.leaves_out_by_probe(case, probes.get(case.runtime))])

    def leaves_out_by_products(self, case: Case, speed: Speed) -> bool:
        least_ms = least_ms_by_products(case, speed.bound)
        source = f"{speed.measured / 1e9:.0f} GFLOP/s of torch.matmul"
        return self.leaves_out(case, least_ms, "its matrix products alone", source, speed.is_disturbed)

    def probe(self, cases: Sequence[Case]) -> dict[str, Row]:
        """The rows of these cases of one model at a shorter length, by runtime; parity is judged at the full length."""
        probes = [probe for case in cases if (probe := probe_of(case, self.plan.probed_length))]
        settings, done = self.bench.settings, len(self.bench.rows)
        self.bench.settings = replace(settings, rounds=PROBE_ROUNDS, parity=False, memory=False)
        try:
            self.bench.size(probes)
        finally:
            self.bench.settings = settings
        # what cannot run says so again at the full length
        self.bench.rows[done:] = [row for row in self.bench.rows[done:] if row.timing is not None]
        return {row.case.runtime: row for row in self.bench.rows[done:]}

    def leaves_out_by_probe(self, case: Case, probe: Row | None) -> bool:
        """True if a case would miss the limit even if its time grew only linearly with its length."""
        if probe is None or probe.timing is None:
            return False
        short_ms, length = probe.timing.lowest_ms, probe.case.seq_len
        least_ms = short_ms * case.seq_len / length / (1 if probe.is_quotable else MOST_DISTURBED)
        source = f"{duration(short_ms)} for {length:,} tokens"
        return self.leaves_out(case, least_ms, "it", source, not probe.is_quotable)

    def leaves_out(self, case: Case, least_ms: float | None, what: str, source: str, is_disturbed: bool) -> bool:
        """Add a row that is not run if the case misses the limit by far. source: what that was extrapolated from."""
        if least_ms is None or not misses(least_ms, self.plan.longest_ms(self.fastest_ms)):
            return False
        reason = f"left out: {what} would take at least {duration(least_ms)}, extrapolated from {source}"
        if is_disturbed:
            reason += f", {MOST_DISTURBED} times as fast because other programs disturbed that"
        self.bench.rows.append(Row(case=case, status="not run", reason=reason))
        self.bench.pace.say(f"{describe(case)}: left out")
        return True

    @property
    def fastest_ms(self) -> float | None:
        """Of the full length, within the memory limit."""
        limit = self.plan.limits.memory_bytes
        full = [row for row in self.bench.rows if row.case.model_seq_len is None and row.timing is not None]
        fits = [row for row in full if limit is None or row.peak_bytes is None or row.peak_bytes <= limit]
        return min((row.timing.median_ms for row in fits if row.timing is not None), default=None)


@dataclass(frozen=True)
class Speed:
    """Operations per second of a large product in float32, with all threads. is_disturbed: by other programs."""

    measured: float
    is_disturbed: bool

    @property
    def bound(self) -> float:
        """The speed that an undisturbed processor reaches at most."""
        return self.measured * (MOST_DISTURBED if self.is_disturbed else 1)


def speed_of_products(bench: Bench) -> Speed:
    call = TimedCall("products", run_products([LARGE_PRODUCT]), "torch")
    judges_waits = bench.threads <= bench.machine.cores
    rotation = Rotation([call], SPEED_ROUNDS, SPEED_SECONDS, bench.machine, judges_waits)
    rotation.run()
    undisturbed = rotation.samples[call.name]
    seconds = min((undisturbed or rotation.disturbed[call.name]).values())
    return Speed(LARGE_PRODUCT.flops / seconds, not undisturbed)
