"""Which variant on which runtime is fastest here, under a memory limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from effexport.bench.results import BenchResults, Row
from effexport.errors import UserError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
OTHER_MODELS = (
    "The variants are different models, not other implementations of one: weights of one do not fit another, so this "
    "is a choice to make before training."
)


@dataclass(frozen=True)
class Advice:
    """ranked: fastest first, within the limit. beyond: measured, and over the limit or of unknown memory."""

    ranked: tuple[Row, ...]
    beyond: tuple[Row, ...]
    limit_bytes: int | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """The advice, what it saves against softmax where that was measured, and what it does not say."""
        limit = "" if self.limit_bytes is None else f" within {megabytes(self.limit_bytes)}"
        if not self.ranked:
            return (f"Nothing that was measured runs{limit}.",)
        best = self.ranked[0]
        assert best.timing is not None
        case = best.case
        memory = "" if best.peak_bytes is None else f" and {megabytes(best.peak_bytes)}"
        size = f"{case.batch} × {case.seq_len} tokens"
        first = f"Fastest{limit} for {size}: {case.label} on {case.runtime}, {best.timing.median_ms:.3g} ms{memory}."
        return (first, *self.same_model(best), OTHER_MODELS)

    def same_model(self, best: Row) -> tuple[str, ...]:
        """For those who have trained softmax already: its fastest runtime."""
        softmax = next((row for row in self.ranked if row.case.variant == "softmax"), None)
        if softmax is None or softmax is best or softmax.timing is None:
            return ()
        return (f"Fastest for softmax itself: {softmax.case.runtime}, {softmax.timing.median_ms:.3g} ms.",)


def advice_from_results(results: BenchResults, limit_bytes: int | None = None) -> Advice:
    """Rank the rows of all sizes; a run for advice has one."""
    measured = sorted((row for row in results.rows if row.timing is not None), key=median_ms)
    if limit_bytes is None:
        return Advice(tuple(measured), (), None)
    fits = [row for row in measured if row.peak_bytes is not None and row.peak_bytes <= limit_bytes]
    return Advice(tuple(fits), tuple(row for row in measured if row not in fits), limit_bytes)


def median_ms(row: Row) -> float:
    assert row.timing is not None
    return row.timing.median_ms


def bytes_from_text(text: str) -> int:
    """`2GB`, `500MB`, `1.5 GiB` → bytes. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise UserError(f"--memory-limit is {text!r}; expected an amount such as 2GB, 500MB or 1.5GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def ranking(advice: Advice) -> Sequence[tuple[int | None, Row]]:
    """Rank and row; no rank for what is beyond the limit."""
    return [*enumerate(advice.ranked, start=1), *((None, row) for row in advice.beyond)]
