"""The options of `effexport verify` and `prove` that a report records, so that its pages can show how a check is
repeated.

A report may come from anybody, and a command on its page is there to be copied: only these options are read, with
values that can be theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from effexport.artifact import REMEDY
from effexport.base.errors import UserError
from effexport.base.runtimes import ARTIFACT_RUNTIMES
from effexport.proof.check import GOLDEN_SUFFIX, NAMED
from effexport.runners.options import LAST_DEVICE, implementation_per_op

MODEL, WEIGHTS, DATA, REFERENCE = "--model", "--weights", "--data", "--reference"
AGAINST = "--against"  # of prove
IMPLEMENTATION, DEVICE, PRECISION_HINT = "--implementation", "--device", "--precision-hint"


def is_path(value: str) -> bool:
    return value != "" and value.isprintable() and not value.startswith("-")


def is_reference(value: str) -> bool:
    runtime = value.rpartition("@")[2]
    return value in NAMED or (is_path(value) and (value.endswith(GOLDEN_SUFFIX) or runtime in ARTIFACT_RUNTIMES))


def is_implementation(value: str) -> bool:
    try:
        implementation_per_op(value)
    except UserError:
        return False
    return is_path(value)


def is_device(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= len(str(LAST_DEVICE))


def is_precision_hint(value: str) -> bool:
    return any(value in runtime.precision_hints for runtime in ARTIFACT_RUNTIMES.values())


# What an option's value may be.
RECORDED: dict[str, Callable[[str], bool]] = {
    AGAINST: is_path,
    MODEL: is_path,
    WEIGHTS: is_path,
    DATA: is_path,
    REFERENCE: is_reference,
    IMPLEMENTATION: is_implementation,
    DEVICE: is_device,
    PRECISION_HINT: is_precision_hint,
}


def check_options(options: Sequence[str], file: Path) -> None:
    """Raise UserError unless a report that was read from a file has options that effexport records, each once."""
    names, values = options[::2], options[1::2]
    problem = next((name for name in names if name not in RECORDED or names.count(name) > 1), None)
    for name, value in zip(names, values, strict=False):
        if problem is None and not RECORDED[name](value):
            problem = f"{name} {value}"
    if problem is None and len(names) != len(values):
        problem = names[-1]
    if problem is not None:
        raise UserError(f"{file} is damaged: effexport records no option {problem[:80]!r}; {REMEDY}")
