"""Amounts as people write and read them: sizes in bytes, times, counts and measured values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from effexport.base.errors import UserError

NOTHING = "–"
_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}
_MILLISECONDS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3}
_DURATIONS: Sequence[tuple[float, str]] = ((1e3, "s"), (1.0, "ms"), (1e-3, "µs"))
_SIZES: Sequence[tuple[float, str]] = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_RATES: Sequence[tuple[float, str]] = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def bytes_from_text(text: str, option: str) -> int:
    """Read a size: `4GB` is 4 × 10⁹ bytes, `4GiB` is 4 × 2³⁰, `4096` is 4096; the B may be left out.

    Raises UserError, which names `option`, for anything else and for less than one byte.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([KMG]?I?)B?", text.strip().upper())
    size = int(float(match[1]) * _PREFIXES[match[2]]) if match and match[2] in _PREFIXES else 0
    if size < 1:
        raise UserError(
            f"{option} is {text!r}; expected bytes, such as 4000000000, or a size such as 500MB, 4GB (powers of 1000) "
            "or 1.5GiB (powers of 1024)"
        )
    return size


def tokens_from_text(text: str, option: str) -> int:
    """Read a length: `512` is 512 tokens, `32k` is 32 × 1024 and `1M` is 1024 × 1024, as models are named.

    Raises UserError, which names `option`, for anything else. Whoever needs a positive length checks that itself.
    """
    match = re.fullmatch(r"(-?[0-9]{1,15}(?:\.[0-9]{1,15})?)([KM]?)", text.strip().upper())
    length = float(match[1]) * _TOKENS[match[2]] if match else 0.5
    if not length.is_integer():
        raise UserError(f"{option} has {text!r}; expected a length in tokens, such as 512 or 32k (32 × 1024)")
    return int(length)


def milliseconds_from_text(text: str, option: str) -> float:
    """Read a time: `200ms`, `1.5s` or `50us`.

    Raises UserError, which names `option`, for anything else and for zero.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|ms|us|µs)", text.strip().lower())
    value = float(match[1]) * _MILLISECONDS[match[2]] if match else 0.0
    if value <= 0:
        raise UserError(f"{option} is {text!r}; expected a time with its unit, such as 200ms or 1.5s")
    return value


def memory(size_bytes: float | None) -> str:
    """Bytes as kB, MB or GB (powers of 1000) with three significant digits."""
    if size_bytes is not None and size_bytes < 1000:
        return counted(round(size_bytes), "byte")
    return _with_unit(size_bytes, _SIZES)


def megabytes(size_bytes: float) -> str:
    """Bytes as MB with one decimal, so that the sizes of several files compare at a glance."""
    return f"{size_bytes / 1e6:,.1f} MB"


def seconds(value: float) -> str:
    """Seconds with one decimal."""
    return f"{value:,.1f} s"


def duration(value_ms: float | None) -> str:
    """Milliseconds as s, ms or µs with three significant digits."""
    return _with_unit(value_ms, _DURATIONS)


def duration_with(value_ms: float, width_ms: float) -> str:
    """`12.3 ± 0.42 ms`: a time and its spread in one unit."""
    size, unit = _unit(value_ms, _DURATIONS)
    return f"{three_digits(value_ms / size)} ± {_digits(width_ms / size, 2)} {unit}"


def rough_duration(seconds: float) -> str:
    """`45 s`, `3 min`: a time of which only the magnitude matters."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def moment(created: str) -> str:
    """`2026-01-02T03:04:05+00:00` as `2026-01-02 03:04:05 UTC`."""
    return created.replace("T", " ").replace("+00:00", " UTC")


def number(value: float | None) -> str:
    """A count as an integer, an error with two significant digits."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.2g}"


def three_digits(value: float | None) -> str:
    """12.3, 0.0123, 1,230: three significant digits, and all digits before the decimal point."""
    return NOTHING if value is None else _digits(value, 3)


def rate(per_second: float | None) -> str:
    """`1.23 M`: a number per second."""
    if per_second is None:
        return NOTHING
    size, unit = _unit(per_second, _RATES)
    return f"{three_digits(per_second / size)}{unit}"


def times(ratio: float | None) -> str:
    """`1.23 ×`."""
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
    """The largest unit in which the rounded value is at least 1, else the smallest unit."""
    rounded = abs(float(f"{value:.3g}"))
    return next((entry for entry in units if rounded >= entry[0]), units[-1])
