"""Texts for people: amounts with their units, foreign texts on one line of a terminal, and commands to paste."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


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


def words(text: str, option: str) -> tuple[str, ...]:
    """The parts of a list with commas. Raises UserError for an empty one."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UserError(f"{option} is {text!r}; expected a list with commas, without empty parts")
    return parts


def numbers(text: str, option: str) -> tuple[int, ...]:
    parts = words(text, option)
    for part in parts:
        if not part.lstrip("-").isdecimal():
            raise UserError(f"{option} has {part!r}; expected integers with commas between them, such as 512,2048")
    return tuple(int(part) for part in parts)


def lengths(text: str, option: str) -> tuple[int, ...]:
    return tuple(tokens_from_text(part, option) for part in words(text, option))


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


def one_line(text: str) -> str:
    """A text in which line feeds, escape sequences and marks that turn its direction can be seen and do nothing."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as one line that can be copied, whatever markup it seems to have."""
    console.print(one_line(text), style=style, markup=False, emoji=False, soft_wrap=True)


# A word of the command itself, a path, or an option with its value. Names of files and values may be anybody's.
Word = str | Path | tuple[str, object]


def command_line(*words: Word) -> str:
    """`effexport verify "my artifact"`: a command for any shell, in one line."""
    return " ".join(text for word in words for text in _texts(word))


def _texts(word: Word) -> tuple[str, ...]:
    if isinstance(word, str):
        return (quoted(word),)
    if isinstance(word, Path):
        return (quoted(str(word) if not str(word).startswith("-") else f"./{word}"),)
    option, value = word
    # joined, so that nobody takes the value for another option
    return (quoted(f"{option}={value}"),) if str(value).startswith("-") else (option, quoted(str(value)))


def quoted(word: str) -> str:
    """In double quotes where that is enough, which is easier to read and works on Windows too; characters that control
    a terminal, such as line feeds, are written as bash and zsh read them."""
    if not word.isprintable():
        return f"$'{''.join(map(_escaped, word))}'"
    if word == shlex.quote(word) or set(word) & set('"$`\\!'):
        return shlex.quote(word)
    return f'"{word}"'


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    # a byte of a name that is not UTF-8, or half of a sign in JSON
    errors = "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in sign.encode("utf-8", errors))
