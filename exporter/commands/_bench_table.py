"""The tables of a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.commands._options import cell, say
from effexport.units import NOTHING, counted, memory, three_digits

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.bench.results import BenchResults, Row

BUSY = "most timings vary by more than a quarter of their median; other programs are probably using this machine"
BELOW_FLOOR = (
    "some rows are faster than their floor (÷ floor below 1): the floor uses PyTorch's matrix products, whose results "
    "go through memory; fused kernels keep them in the cache"
)
IN_BRACKETS = "; in brackets: disturbed by other programs"
STYLES = {"failed": "bold red", "disturbed": "yellow", "not run": "yellow"}
# Columns of numbers, after the columns of words.
FIGURES = ("tokens", "median ms", "± ms", "tokens/s", "× softmax", "× torch", "floor ms", "÷ floor", "peak")


def print_rows(console: Console, results: BenchResults) -> None:
    """Print a line per timed row; below it, the rows that were disturbed, failed or did not run, with the reason."""
    from rich.table import Table

    from effexport.bench.findings import disturbance

    table = Table(box=None, pad_edge=False)
    for title in ("model", "runtime", "operators", "parity"):
        table.add_column(title, no_wrap=True)
    for title in FIGURES:
        table.add_column(title, justify="right", no_wrap=True)
    several = {name: len({getattr(row.case, name) for row in results.rows}) > 1 for name in ("batch", "precision")}
    for row in results.rows:
        if row.timing is not None:
            table.add_row(*map(cell, line(row, several)))
    warning = disturbance(results)
    if warning:
        say(console, warning, style="bold yellow")
    if table.rows:
        console.print(table)
        say(
            console,
            f"median of up to {results.rounds} interleaved runs ± half the interquartile range, "
            f"{counted(results.threads, 'thread')}; × softmax, × torch: times faster; floor: the matrix products "
            "of the formula plus one pass over inputs and outputs; parity: the error measured before timing"
            + (IN_BRACKETS if warning else ""),
            style="dim",
        )
    for text, style in remarks(results):
        say(console, text, style=style)


def line(row: Row, several: dict[str, bool]) -> list[str]:
    case, timing = row.case, row.timing
    assert timing is not None
    model = case.label + (f", {case.precision}" if several["precision"] else "")
    tokens = f"{case.batch} × {case.seq_len}" if several["batch"] or case.batch > 1 else str(case.seq_len)
    return [
        model,
        case.runtime,
        ", ".join(sorted(set(row.implementation.values()))) or NOTHING,
        NOTHING if row.parity is None or row.parity.value is None else f"{row.parity.value:.1e}",
        tokens,
        f"({three_digits(timing.median_ms)})" if row.status == "disturbed" else three_digits(timing.median_ms),
        three_digits(timing.spread_ms),
        three_digits(row.tokens_per_second),
        three_digits(row.times_softmax),
        three_digits(row.times_torch),
        three_digits(None if row.floor is None else row.floor.total_ms),
        three_digits(row.times_floor),
        memory(row.peak_bytes),
    ]


def remarks(results: BenchResults) -> list[tuple[str, str]]:
    """Texts with their styles: general warnings, then reasons and notes, each once for all rows that share it."""
    texts: dict[tuple[str, str], list[str]] = {}
    for row in results.rows:
        where = f"{row.case.label} on {row.case.runtime}, {row.case.batch} × {row.case.seq_len}"
        if row.status != "measured":
            texts.setdefault((f"{row.status}: {row.reason}", STYLES[row.status]), []).append(where)
        if row.note:
            texts.setdefault((f"note: {row.note}", "dim"), []).append(where)
    busy = [(BUSY, "yellow")] if is_busy(results) else []
    if any(row.times_floor is not None and row.times_floor < 1 for row in results.rows):
        busy.append((BELOW_FLOOR, "yellow"))
    return busy + [(f"{text} ({'; '.join(shortened(wheres))})", style) for (text, style), wheres in texts.items()]


def is_busy(results: BenchResults) -> bool:
    """Whether at least half of the undisturbed timings vary by more than a quarter of their median."""
    timings = [row.timing for row in results.rows if row.timing is not None and row.is_quotable]
    wide = [timing for timing in timings if timing.spread_ms > 0.25 * timing.median_ms]
    return bool(timings) and 2 * len(wide) >= len(timings)


def shortened(wheres: list[str], most: int = 4) -> list[str]:
    return wheres if len(wheres) <= most else [*wheres[:most], f"and {len(wheres) - most} more"]
