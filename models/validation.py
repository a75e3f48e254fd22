"""Checks of what users give: one error type, messages that name the nearest value that works, and a limit on the size
of files that describe a model."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Indices into a tensor of this many rows still fit into int32, which the operators count with.
LARGEST_SIZE = 2**31 - 1
LARGEST_SEED = 2**63 - 1
# Far more than anyone has trained; a model of so many layers is not built one by one to find out that it is too large.
MOST_LAYERS = 10_000
# Hash rounds and iterations: models have up to 16.
MOST_REPEATS = 1_000
# Numbers in a list, such as axes of positions or factors of a number of buckets.
LONGEST_LIST = 32
# Longer words are not compared with known ones: difflib keeps the place of every character.
LONGEST_WORD = 100
LONGEST_REASON = 300
# Of a folder in which a name is looked for; one with more is not a folder of models.
MOST_ENTRIES = 1_000
# Paths that are looked at, of each depth.
MOST_SIMILAR = 10


class SpecError(ValueError):
    """A spec that cannot work. The message says what was given, what was expected and what to do."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def shown(value: object, longest: int = 80) -> str:
    """A value for a message, cut to a bounded length."""
    try:
        text = beginning_of_repr(value, longest)
    except (ValueError, RecursionError):  # Python does not write integers of thousands of digits
        return "an integer of thousands of digits" if isinstance(value, int) else "a deeply nested value"
    return text if len(text) <= longest else f"{text[:longest]}…"


def beginning_of_repr(value: object, length: int) -> str:
    """At least `length` characters of the beginning of repr(value), or all: that of millions of elements takes seconds.

    Raises what repr raises.
    """
    if isinstance(value, str):
        return repr(value[: length + 1])
    if type(value) is not list and type(value) is not dict:
        return repr(value)
    parts: list[str] = []
    left = length
    for item in value.items() if isinstance(value, dict) else ((one,) for one in value):
        parts.append(": ".join(beginning_of_repr(one, length) for one in item))
        left -= len(parts[-1])
        if left < 0:
            break
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + ", ".join(parts) + closing


def shown_name(name: str, longest: int = LONGEST_WORD) -> str:
    """A name or a phrase from elsewhere for a message: as it is, if it is short and can be printed."""
    return name if name.isprintable() and len(name) <= longest else shown(name, longest)


def shown_reason(error: BaseException) -> str:
    """The first sentence of an error of a library, which may quote anything from a file."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
    return shown_name(text, LONGEST_REASON)


def in_one_line(error: BaseException) -> str:
    """The message of an error of the user's code, with its type where that says more: a KeyError is the key alone."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    return f"{kind}: {text}" if text and isinstance(error, KeyError) else text or kind


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: `"; did you mean 'x'?"`, or `"."` when nothing is close."""
    text = word if isinstance(word, str) else shown(word)
    close = difflib.get_close_matches(text[:LONGEST_WORD].lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def near_path(path: Path, wanted: Callable[[Path], bool] = os.path.exists) -> str:
    """The end of a sentence about a path that does not exist: the one beside it with the most similar name, for which
    `wanted` holds, if there is one. A folder above may be the one that was mistyped."""
    found = [Path(path.anchor)]
    for part in path.parts[bool(path.anchor) :]:
        found = [one for folder in found for one in entries_like(folder, part)][:MOST_SIMILAR]
    known = [str(one) for one in found if one != path and wanted(one)]
    close = max(known, key=lambda one: difflib.SequenceMatcher(None, one, str(path)).ratio(), default="")
    return f"; did you mean {close}?" if close else ""


def entries_like(folder: Path, name: str) -> list[Path]:
    """An entry of a folder, or else the entries with the most similar names."""
    if name == ".." or os.path.lexists(folder / name):
        return [folder / name]
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, MOST_ENTRIES) if entry.name[:1] != "."]
    except OSError:
        return []
    lower = {other.lower(): other for other in names}
    return [folder / lower[one] for one in difflib.get_close_matches(name[:LONGEST_WORD].lower(), lower, cutoff=0.6)]


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`, as text for an error message."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def nearest_divisors(value: int, total: int) -> str:
    """The divisors of `total` closest to `value` on either side, as text for an error message."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = sorted({*small, *(total // d for d in small)})
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(str(d) for d in below + above)


def check_kernel_size(name: str, size: int | None) -> None:
    """The filter of a convolution along seq is centred, so its number of taps is odd; None for no convolution."""
    if size is None:
        return
    nearest = f"{size - 1} or {size + 1}" if size >= 2 else "1"
    require(
        size >= 1 and size % 2 == 1,
        f"{name} is {size}; the filter is centred, so it must be odd; the nearest that work: {nearest}",
    )


def as_written(value: Any) -> Any:
    """A value as it stands in a file: specs keep lists as tuples."""
    return list(value) if isinstance(value, tuple) else value


def check_field_types(spec: Any, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
    """Field values must have the declared type, and integers a size that can mean anything: TOML, JSON and manifests
    hand over whatever stands in them. renamed: field → its name in messages, where that differs."""
    for field in dataclasses.fields(spec):
        check_type(renamed.get(field.name, field.name), getattr(spec, field.name), str(field.type))


def check_type(name: str, value: Any, declared: str) -> None:
    """declared: the annotation of a field, as it is written. Types that no spec is read with are not looked at."""
    if declared.startswith("Literal"):
        allowed = [word.strip().strip("'\"") for word in declared[len("Literal[") : -1].split(",")]
        require(value in allowed, f"{name} is {shown(value)}; expected one of {', '.join(allowed)}")
    elif declared in _PLAIN_TYPES:
        accepted, words = _PLAIN_TYPES[declared]
        is_bool = isinstance(value, bool) and bool not in accepted
        require(
            isinstance(value, accepted)
            and not is_bool
            and (float not in accepted or value is None or is_finite(value)),
            f"{name} is {shown(value)}; expected {words}",
        )
        if type(value) is int and float not in accepted:
            check_size(name, value)
    elif declared == "int | tuple[int, ...] | None":
        items = value if isinstance(value, tuple) else (value,)
        require(
            value is None or (items != () and all(type(item) is int for item in items)),
            f"{name} is {shown(as_written(value))}; expected an integer or a list of integers",
        )
        check_list_length(name, items)
        for item in items:
            check_size(name, item or 0)


def check_size(name: str, value: int) -> None:
    """Raise SpecError for an integer beyond what any size or seed can be."""
    limit = LARGEST_SEED if name.endswith("seed") else LARGEST_SIZE
    require(abs(value) <= limit, f"{name} is {shown(value)}; expected at most {limit}")


def check_list_length(name: str, items: Collection[object], longest: int = LONGEST_LIST) -> None:
    require(len(items) <= longest, f"{name} is a list of {len(items)}; expected at most {longest}")


def check_layers(name: str, count: int) -> None:
    check_count(name, count, MOST_LAYERS)


def check_count(name: str, count: int, most: int) -> None:
    """Raise SpecError for a count that is not positive, or beyond what any model has."""
    require(count >= 1, f"{name} is {count}; expected at least 1")
    require(count <= most, f"{name} is {count}; expected at most {most}")


def is_finite(value: Any) -> bool:
    """True if a number, an integer as well, is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "int | None": ((int, type(None)), "an integer"),
    "float": ((int, float), "a finite number"),
    "float | None": ((int, float, type(None)), "a finite number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a word"),
}


class ShortRepr:
    """Base of dataclasses (with repr=False) whose repr is the call that makes them: only the fields that differ from
    their defaults."""

    def __repr__(self) -> str:
        changed = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({', '.join(changed)})"


# config.json with the names of 20,000 classes has 2 MB.
MOST_BYTES_OF_CONFIG = 4 << 20
# An index of 100,000 weights has 9 MB, and the largest vocabularies have 40 MB.
MOST_BYTES_OF_INDEX = 32 << 20
MOST_BYTES_OF_VOCABULARY = 128 << 20


class FileTooLargeError(ValueError):
    """A file is larger than what it should hold can be."""


def bounded_bytes(path: Path, most_bytes: int) -> bytes:
    """The contents of a file. Raises FileTooLargeError, without having read all of it, and OSError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size if stat.S_ISREG(status.st_mode) else most_bytes  # a pipe has no size
        # `read` takes memory for as much as it is asked for
        data = file.read(size) if size <= most_bytes else b""
        if size > most_bytes or file.read(1):
            raise FileTooLargeError(f"it is larger than {most_bytes >> 10} KB")
    return data
