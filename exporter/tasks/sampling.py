"""Options of generated texts: length, and choice of tokens. No numpy, so that `--help` shows the defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from effexport.base.errors import UserError
from effexport.models.validation import SpecError, check_field_types, did_you_mean, shown

SEED_BITS = 63
# Smaller ones might overflow, and choose as 0 does.
LEAST_TEMPERATURE = 1e-6
# What other servers call a field in requests.
ALIASES = {"max_tokens": "max_new_tokens"}
# An option of requests: whether the text is sent in pieces.
STREAM = "stream"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of one generated text. Raises UserError for values that cannot work.

    max_new_tokens: the text ends after so many tokens.
    temperature: divides the logits before the softmax; 0 takes the most probable token (greedy).
    top_k: sample among the k most probable tokens only; None: among all.
    seed: of the random numbers; None: another one each time. Greedy generation needs none.
    stop_at_eos: whether the tokenizer's end-of-text token ends the text; it is not part of it.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop_at_eos: bool = True

    def __post_init__(self) -> None:
        try:
            check_field_types(self)
        except SpecError as error:
            raise UserError(str(error)) from error
        for name in ("max_new_tokens", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; expected at least 1")
        if self.temperature != 0 and self.temperature < LEAST_TEMPERATURE:
            least = f"at least {LEAST_TEMPERATURE:g}"
            raise UserError(f"temperature is {self.temperature:g}; expected 0, which is greedy, or {least}")
        if self.seed is not None and not 0 <= self.seed < 2**SEED_BITS:
            raise UserError(f"seed is {self.seed}; expected 0 to 2^{SEED_BITS} - 1")


SAMPLING_OPTIONS = tuple(field.name for field in fields(Sampling))


def sampling_from_options(given: Iterable[tuple[str, Any]]) -> tuple[Sampling, Any]:
    """The sampling that the options of a request ask for, and the value of `stream`; None counts as not given.

    Raises UserError for an option that is unknown, is given twice, or cannot work.
    """
    names, found = (STREAM, *SAMPLING_OPTIONS), dict[str, Any]()
    for name, value in given:
        own = ALIASES.get(name, name)
        if own not in names:
            raise unknown_name("parameter", name, [*names, *ALIASES])
        if own in found:
            raise UserError(f"the parameter {own} is given twice")
        found[own] = value
    stream = found.pop(STREAM, None)
    return Sampling(**{name: value for name, value in found.items() if value is not None}), stream


def unknown_name(kind: str, name: str, names: Sequence[str]) -> UserError:
    return UserError(f"unknown {kind} {shown(name)}{did_you_mean(name, names)} Expected: {', '.join(names)}")
