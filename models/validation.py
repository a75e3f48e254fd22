"""How specs check themselves: one error type, and messages that name the nearest value that works."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any

# Indices into a tensor of this many rows still fit into int32, which the operators count with.
LARGEST_SIZE = 2**31 - 1
# Longer words are not compared with known ones: difflib keeps the place of every character.
LONGEST_WORD = 100


class SpecError(ValueError):
    """A spec that cannot work. The message says what was given, what was expected and what to do."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def shown(value: object, longest: int = 80) -> str:
    """A value for a message, cut to a bounded length."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: `"; did you mean 'x'?"`, or `"."` when nothing is close."""
    close = difflib.get_close_matches(str(word)[:LONGEST_WORD].lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`, as text for an error message."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def nearest_divisors(value: int, total: int) -> str:
    """The divisors of `total` closest to `value` on either side, as text for an error message."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
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


def check_field_types(spec: Any) -> None:
    """Field values must have the declared type: TOML and JSON hand over whatever the user wrote."""
    for field in dataclasses.fields(spec):
        check_type(field.name, getattr(spec, field.name), str(field.type))


def check_type(name: str, value: Any, declared: str) -> None:
    """declared: the annotation of a field, as it is written. Types that no spec is read with are not looked at."""
    if declared.startswith("Literal"):
        allowed = [word.strip().strip("'\"") for word in declared[len("Literal[") : -1].split(",")]
        require(value in allowed, f"{name} is {shown(value)}; expected one of {', '.join(allowed)}")
    elif declared in _PLAIN_TYPES:
        accepted, words = _PLAIN_TYPES[declared]
        is_bool = isinstance(value, bool) and bool not in accepted
        finite = not isinstance(value, float) or math.isfinite(value)
        require(
            isinstance(value, accepted) and not is_bool and finite,
            f"{name} is {shown(value)}; expected {words}",
        )
    elif declared == "int | tuple[int, ...] | None":
        items = value if isinstance(value, tuple) else (value,)
        require(
            value is None or (items != () and all(type(item) is int for item in items)),
            f"{name} is {shown(as_written(value))}; expected an integer or a list of integers",
        )


_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "int | None": ((int, type(None)), "an integer"),
    "float": ((int, float), "a finite number"),
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
