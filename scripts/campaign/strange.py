"""Strange values that a mutation puts in the place of right ones, and damage to files."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What would be a line of its own, and an option, if a name could make one.
FORGED, OPTION = "FORGED: a line", "--force"
NESTED: list[Any] = []
for _ in range(600):
    NESTED = [NESTED]

STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 999, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**29, 10**4000, 10**5000),
    *(1.5, -0.0, 1e-320, 1e308, -1e300, float("nan"), float("inf"), 10.0**12),
    *("", "x", "nan", "inf", "../x", "/etc/passwd", "x" * 5000, "\u0000", "\ud800", "\n\x1b[2J", "<b>&'\"", "[red]"),
    *("1\nRUN id", "1.0 $(id)", "'; id; '", "/m:ro # x"),
    *(f"x\n{FORGED}", OPTION, ["-o", "x", OPTION], ["--model", OPTION]),
    *([], {}, [None], [[]], [-1], [2**62, 2**62], {"": None}, {"passed": 1}, NESTED),
)  # fmt: skip


def mutated_json(value: Any, dice: random.Random) -> tuple[Any, str]:
    """A copy of a JSON value with one change in a random place, and what was changed, in words."""
    root = copy.deepcopy(value)
    places = [(parent, key, path) for parent, key, path in _places(root, "$") if path != "$.integrity"]
    parent, key, path = dice.choice(places)
    how = dice.choice(("replace", "replace", "replace", "replace", "delete", "add", "similar"))
    if how == "delete":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[dice.choice(("x", "", "\u0000", "__class__", "\ud800"))] = dice.choice(STRANGE)
    elif how == "add":
        parent.insert(key, dice.choice((parent[key], *STRANGE)))
    elif how == "similar":
        parent[key] = _similar(parent[key], dice)
    else:
        parent[key] = dice.choice(STRANGE)
    return root, f"{how} {path[:80]} {_shown(parent[key]) if how in ('replace', 'similar') else ''}"


def _shown(value: Any) -> str:
    """The beginning of a value, in ASCII; Python does not print the longest integers."""
    is_huge = isinstance(value, int) and abs(value) > 2**100
    return f"an integer of {value.bit_length()} bits" if is_huge else ascii(value)[:60]


def _places(value: Any, path: str) -> list[tuple[Any, Any, str]]:
    """Every key and element below a value: its container, its key and its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in items:
        below = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        found.append((value, key, below))
        found += _places(item, below)
    return found


def _similar(value: Any, dice: random.Random) -> Any:
    """A value of the same type that differs."""
    match value:
        case bool():
            return not value
        case int():
            return dice.choice((value + 1, value - 1, value * 2, -value, value * 10**12, value + 2**32))
        case float():
            return dice.choice((value * 1.5, -value, value * 1e300, value + 1))
        case str():
            return dice.choice((value + "x", value[:-1], value.upper(), value[::-1]))
        case list():
            return dice.choice((value[::-1], value * 2, value[:-1]))
        case dict():
            return dict(reversed(value.items()))
    return 0


def text_of(values: Any) -> str:
    """JSON as effexport indents it, of values that it would never write."""
    with any_number_of_digits():
        return json.dumps(values, indent=2) + "\n"


@contextlib.contextmanager
def any_number_of_digits() -> Iterator[None]:
    """Let Python write integers of more than 4,300 digits, which it refuses by default."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


# Of its bytes, and of the file as a whole.
DAMAGED = ("cut", "flip", "flip", "flip", "fill", "empty", "append")
REPLACED = ("missing", "folder", "loop", "pipe", "outside", "dangling", "huge")


def damage(file: Path, dice: random.Random) -> str:
    """Damage a file as a bad disk or an attacker would, whatever is in it. Returns what was done, in words."""
    how, data = dice.choice((*DAMAGED, *REPLACED)), bytearray(file.read_bytes())
    place = dice.randrange(dice.choice((len(data), min(len(data), 3000)))) if data else 0
    if how in REPLACED or not data:
        file.unlink()
    match how:
        case "cut":
            file.write_bytes(data[:place])
        case "flip" if data:
            data[place] ^= 1 << dice.randrange(8)
            file.write_bytes(data)
        case "fill":
            file.write_bytes(data[:place] + dice.randbytes(64) + data[place + 64 :])
        case "empty":
            file.write_bytes(b"")
        case "append":
            file.write_bytes(data + dice.randbytes(100))
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "loop" | "outside" | "dangling":
            file.symlink_to({"loop": file.name, "outside": "/etc/passwd", "dangling": "nowhere"}[how])
        case "huge":
            with file.open("wb") as stream:
                stream.truncate(1 << 40)
    return f"{how} {file.name} at {place}"


def contents(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of everything in a folder, links not followed."""
    found = ((path, path.lstat()) for path in sorted(folder.rglob("*")))
    return [(path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns) for path, status in found]
