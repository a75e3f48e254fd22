"""Measurements as people read them: three significant digits, in the unit that suits the size."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = "–"
_DURATIONS: Sequence[tuple[float, str]] = ((1e3, "s"), (1.0, "ms"), (1e-3, "µs"))
_SIZES: Sequence[tuple[float, str]] = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_RATES: Sequence[tuple[float, str]] = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def three_digits(value: float | None) -> str:
    """12.3, 0.0123, 1,230: three significant digits, and all of those before the point."""
    return NOTHING if value is None else _digits(value, 3)


def duration(value_ms: float | None) -> str:
    """Milliseconds as s, ms or µs."""
    return _with_unit(value_ms, _DURATIONS)


def duration_with(value_ms: float, width_ms: float) -> str:
    """`12.3 ± 0.42 ms`: a time and how far it varies, in one unit."""
    size, unit = _unit(value_ms, _DURATIONS)
    width = width_ms / size
    return f"{three_digits(value_ms / size)} ± {_digits(width, 2)} {unit}"


def memory(size_bytes: float | None) -> str:
    """Bytes as kB, MB or GB of powers of ten."""
    if size_bytes is not None and size_bytes < 1000:
        return f"{size_bytes:.0f} bytes"
    return _with_unit(size_bytes, _SIZES)


def rate(per_second: float | None) -> str:
    """`1.23 M`: how many in a second."""
    if per_second is None:
        return NOTHING
    size, unit = _unit(per_second, _RATES)
    return f"{three_digits(per_second / size)}{unit}"


def times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{three_digits(ratio)} ×"


def counted(number: int, singular: str, plural: str = "") -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _digits(value: float, count: int) -> str:
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{count}g}")
    if rounded == 0 or abs(rounded) >= 10**count:
        return f"{value:,.0f}"
    if abs(rounded) < 1e-4:
        return f"{rounded:.{count - 1}e}"
    return f"{rounded:.{max(0, count - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _with_unit(value: float | None, units: Sequence[tuple[float, str]]) -> str:
    if value is None:
        return NOTHING
    size, unit = _unit(value, units)
    return f"{three_digits(value / size)} {unit}"


def _unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which the value, as it is rounded, is one at least; the smallest where there is none."""
    rounded = abs(float(f"{value:.3g}"))
    return next((entry for entry in units if rounded >= entry[0]), units[-1])
