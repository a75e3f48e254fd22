"""The rows of a benchmark as a table: values that all rows share are shown once, and empty columns are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effexport.bench.rendering.beside import Entry
from effexport.bench.rendering.headline import reason_of, status_of
from effexport.bench.results import Row
from effexport.proof.check import METRIC
from effexport.units import NOTHING, duration, duration_with, memory, number, rate, three_digits


@dataclass(frozen=True)
class Column:
    """A column of the table. numeric: aligned to the right. is_measured: empty for a row without a timing.

    below: the second line of a cell, where there is one.
    """

    title: str
    text: Callable[[Row], str]
    numeric: bool = True
    is_measured: bool = True
    below: Callable[[Row], str] = lambda row: ""


@dataclass(frozen=True)
class Line:
    """A row of the table. cells: those that describe the case and, if the row has a timing, the measured ones.

    reason: why it has no timing; "" if it has one.
    """

    name: str
    status: str
    cells: tuple[Entry, ...]
    reason: str


@dataclass(frozen=True)
class Table:
    """The table. columns: those after the name, in the order of the cells. groups: the rows of each length, by title.

    shared: values that all rows have, by the title of their column.
    """

    columns: tuple[Column, ...]
    groups: dict[str, list[Line]]
    shared: dict[str, str]

    @property
    def measured(self) -> int:
        """Number of measured columns, which are the last ones."""
        return sum(column.is_measured for column in self.columns)


def parity_text(row: Row) -> str:
    """`2.5e-06 of 0.0002`; the result in words if there is no number."""
    if row.parity is None:
        return NOTHING
    if row.parity.value is None:
        return row.parity.detail or ("passed" if row.parity.passed else "failed")
    return f"{number(row.parity.value)} of {number(row.parity.limit)}"


def implementation_text(row: Row) -> str:
    """`kernel` if all custom operators ran so, else what ran each of them."""
    ran = list(dict.fromkeys(row.implementation.values()))
    return ran[0] if len(ran) == 1 else ", ".join(f"{op}: {what}" for op, what in row.implementation.items()) or NOTHING


def options_text(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.case.options.items()) or NOTHING


def _median(row: Row) -> str:
    return NOTHING if row.timing is None else duration_with(row.timing.median_ms, row.timing.spread_ms)


def _rate(row: Row) -> str:
    return "" if row.timing is None else f"{rate(row.tokens_per_second)} tokens/s"


def _floor(row: Row) -> str:
    return "" if row.floor is None else f"floor {duration(row.floor.total_ms)}"


def _other_metric(row: Row) -> str:
    return "" if row.parity is None or row.parity.metric == METRIC else row.parity.metric


_CASE = (
    Column("Runtime", lambda row: row.case.runtime, False, False),
    Column("Scope", lambda row: row.case.scope, False, False),
    Column("Batch", lambda row: f"{row.case.batch:,}", True, False),
    Column("Precision", lambda row: row.case.precision, False, False),
    Column("Heads", lambda row: f"{row.case.heads} × {row.case.head_dim}", True, False),
)
_MEASURED = (
    Column("Median ± spread", _median, below=_rate),
    Column("× softmax", lambda row: three_digits(row.times_softmax)),
    Column("× torch", lambda row: three_digits(row.times_torch)),
    Column("× floor", lambda row: three_digits(row.times_floor), below=_floor),
    Column("Peak memory", lambda row: memory(row.peak_bytes)),
    Column("Parity", parity_text, below=_other_metric),
    Column("Ran as", implementation_text, False),
    Column("Runs", lambda row: NOTHING if row.timing is None else f"{row.timing.runs:,}"),
)
_SHARED_NAMES = ("Runtime", "Scope", "Batch", "Precision", "Heads", "Runs")


def table_of(rows: Sequence[Row]) -> Table:
    """All rows, grouped by length, in the order of the benchmark."""
    timed = [row for row in rows if row.is_quotable]
    shared: dict[str, str] = {}
    columns = []
    for column in (*_CASE, *_MEASURED):
        texts = {column.text(row) for row in (timed if column.is_measured else rows)}
        known = texts - {NOTHING}
        if len(known) == len(texts) == 1 and column.title in _SHARED_NAMES:
            shared[column.title] = known.pop()
        elif known:
            columns.append(column)
    lengths = sorted({row.case.seq_len for row in rows})
    groups = {
        f"{length:,} tokens": [_line(row, columns) for row in rows if row.case.seq_len == length] for length in lengths
    }
    return Table(tuple(columns), groups, shared)


def differing_options(rows: Iterable[Row]) -> dict[str, str]:
    """Options by model label, for models that have any."""
    return {row.case.label: options_text(row) for row in rows if row.case.options}


def _line(row: Row, columns: Sequence[Column]) -> Line:
    measured = row.is_quotable
    cells = tuple(
        Entry(column.text(row), column.below(row)) for column in columns if measured or not column.is_measured
    )
    return Line(row.case.label, status_of(row), cells, "" if measured else _reason(row))


def _reason(row: Row) -> str:
    """Why a row may not be quoted; for a disturbed row with its median, which is only an upper limit."""
    if row.status != "disturbed" or row.timing is None:
        return reason_of(row)
    return f"{reason_of(row)}; its median was {duration(row.timing.median_ms)}"
