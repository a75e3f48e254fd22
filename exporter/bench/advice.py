"""The plan of `bench --advise`: the cases in order of measurement, and a rough duration. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from effexport.bench.costs import (
    EXPORT_SECONDS,
    FLOPS_PER_CORE,
    START_SECONDS,
    call_seconds,
    memory_cost,
    prepare_cost,
    reason_too_large,
    timing_cost,
)
from effexport.bench.grid import Grid, products_of_case
from effexport.bench.results import Case
from effexport.environment import usable_cores
from effexport.runtimes import RUNTIMES
from effexport.units import duration, listed, memory

if TYPE_CHECKING:
    from effexport.bench.quality import CandidateQuality


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
# Other programs make a timing at most about this many times too long: each core is then shared with three of them.
MOST_DISTURBED = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
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
    def models(self) -> tuple[tuple[Case, ...], ...]:
        """The cases of each model on all runtimes; the model that should be fastest comes first."""
        models: dict[str, list[Case]] = {}
        for case in self.grid.cases():
            models.setdefault(case.label, []).append(case)
        return tuple(sorted(map(tuple, models.values()), key=lambda cases: min(map(call_seconds, cases))))

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(case for model in self.models for case in model)

    @property
    def probed_length(self) -> int | None:
        """The length at which every model is timed first; None if the full length is short."""
        (seq_len,) = self.grid.seq_lens
        return seq_len // PROBE_PART if seq_len > SHORTEST_PROBED else None

    def longest_ms(self, fastest_ms: float | None) -> float | None:
        """The time above which a case need not be measured. fastest_ms: of the models measured so far."""
        if self.limits.latency_ms is not None:
            return self.limits.latency_ms
        return None if fastest_ms is None else TIMES_FASTEST * fastest_ms

    def seconds(self, rounds: int, max_seconds: float) -> float:
        """Roughly how long all of it takes."""
        longest = self.longest_ms(1e3 * min(map(call_seconds, self.cases)))
        return START_SECONDS + sum(self.case_seconds(case, rounds, max_seconds, longest) for case in self.cases)

    def case_seconds(self, case: Case, rounds: int, max_seconds: float, longest_ms: float | None) -> float:
        """The same for one case. One that misses the limit or needs too much memory costs a probe only, or nothing."""
        by_products = least_ms_by_products(case, FLOPS_PER_CORE * usable_cores())
        if misses(by_products, longest_ms):
            return 0.0
        cost = EXPORT_SECONDS if RUNTIMES[case.runtime].graph else 0.0
        probe, is_refused = probe_of(case, self.probed_length), reason_too_large(case) is not None
        if is_refused and (probe is None or reason_too_large(probe) is not None):
            return 0.0
        if probe is not None:
            cost += prepare_cost(probe, parity=False) + timing_cost(probe, PROBE_ROUNDS, max_seconds)
        if is_refused or (probe is not None and misses(1e3 * call_seconds(case), longest_ms)):
            return cost
        return cost + prepare_cost(case) + timing_cost(case, rounds, max_seconds) + memory_cost(case)


def probe_of(case: Case, length: int | None) -> Case | None:
    """The same model, made for the same length, with a shorter input."""
    return None if length is None else replace(case, seq_len=length, model_seq_len=case.seq_len)


def least_ms_by_products(case: Case, flops_per_second: float) -> float | None:
    """A lower bound on the time of a case's matrix products, on a CPU with this speed in float32.

    None for lower precisions, and for GPUs: their matrix units are several times faster.
    """
    if case.precision != "fp32" or RUNTIMES[case.runtime].device != "cpu":
        return None
    flops = sum(product.flops for product in products_of_case(case))
    return SHARE_OF_PRODUCTS * 1e3 * flops / flops_per_second


def misses(least_ms: float | None, longest_ms: float | None) -> bool:
    """True if a case that takes at least this long need not be measured."""
    if least_ms is None or longest_ms is None:
        return False
    return least_ms > max(WORTH_LEAVING_OUT_MS, MARGIN * longest_ms)
