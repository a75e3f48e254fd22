"""Measure what an advice needs in little time: cheap models first, and no model that would clearly miss a limit.

Two bounds leave a model out before its full length is measured. Its matrix products alone take at least half of what
`torch.matmul` needs for them, and a call takes at least as many times longer than a short one as its input is longer.
A row that is left out says so, and has no timing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from effexport.bench.measuring.floor import run_products
from effexport.bench.measuring.plan import PROBE_ROUNDS, Plan, least_ms_by_products, misses, probe_of
from effexport.bench.measuring.progress import OnStep
from effexport.bench.measuring.run import Bench, Settings, bench, describe
from effexport.bench.results import BenchResults, Case, Row
from effexport.models.products import Product
from effexport.units import duration

# A product that is large enough to reach the processor's speed; it takes about 20 ms per core.
LARGE_PRODUCT, SPEED_RUNS = Product(1, 1024, 1024, 1024), 5


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
        speed = flops_per_second()
        for cases in self.plan.models:
            left = [case for case in cases if not self.leaves_out_by_products(case, speed)]
            probes = self.probe(left)
            self.bench.size([case for case in left if not self.leaves_out_by_probe(case, probes.get(case.runtime))])

    def leaves_out_by_products(self, case: Case, speed: float) -> bool:
        least_ms = least_ms_by_products(case, speed)
        return self.leaves_out(
            case, least_ms, "its matrix products alone", f"{speed / 1e9:.0f} GFLOP/s of torch.matmul"
        )

    def probe(self, cases: Sequence[Case]) -> dict[str, Row]:
        """The rows of these cases of one model at a shorter length, by runtime."""
        probes = [probe for case in cases if (probe := probe_of(case, self.plan.probed_length))]
        settings, done = self.bench.settings, len(self.bench.rows)
        self.bench.settings = replace(settings, rounds=PROBE_ROUNDS, memory=False)
        try:
            self.bench.size(probes)
        finally:
            self.bench.settings = settings
        # what cannot run says so again at the full length
        self.bench.rows[done:] = [row for row in self.bench.rows[done:] if row.timing is not None]
        return {row.case.runtime: row for row in self.bench.rows[done:]}

    def leaves_out_by_probe(self, case: Case, probe: Row | None) -> bool:
        """Whether a case would miss the limit even if its time grew no faster than its length."""
        if probe is None or probe.timing is None:
            return False
        short_ms, length = probe.timing.lowest_ms, probe.case.seq_len
        least_ms = short_ms * case.seq_len / length
        return self.leaves_out(case, least_ms, "it", f"{duration(short_ms)} for {length:,} tokens")

    def leaves_out(self, case: Case, least_ms: float | None, what: str, source: str) -> bool:
        """Add a row that is not run if the case misses the limit by far."""
        longest_ms = self.plan.longest_ms(self.fastest_ms)
        if least_ms is None or not misses(least_ms, longest_ms):
            return False
        reason = f"left out: {what} would take at least {duration(least_ms)}, extrapolated from {source}"
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


def flops_per_second() -> float:
    """What one large product in PyTorch reaches with all threads."""
    run = run_products([LARGE_PRODUCT])
    seconds = []
    for _ in range(SPEED_RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    # the fastest run, which other programs disturbed least
    return LARGE_PRODUCT.flops / min(seconds)
