"""Checks of values in SWEEP.toml. All raise SpecError with the key, what was given and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from effexport.bench.grid import Model, model_from_text
from effexport.dtypes import DTYPE_OF_PRECISION
from effexport.errors import UserError
from effexport.models.validation import did_you_mean, require
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.sweep.cell import ONNX_ONLY

_GPU = re.compile(r"sm_[1-9][0-9]{1,2}")


def check_keys(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        require(
            name in known,
            f"{where} has an unknown key {name!r}{did_you_mean(name, known)} Expected: {', '.join(known)}",
        )


def table(name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    value = document.get(name, {})
    require(isinstance(value, dict), f"{name} is {value!r}; expected a table, [{name}]")
    return value  # type: ignore[no-any-return]  # checked above


def tables(name: str, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = document.get(name, [])
    is_list = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    require(is_list, f"{name} is {value!r}; expected tables, each under [[{name}]]")
    for entry in value:
        require(bool(entry), f"an [[{name}]] is empty; expected keys of a cell, such as variant")
    return value  # type: ignore[no-any-return]  # checked above


def distinct_list(name: str, value: Any) -> list[Any]:
    require(isinstance(value, list), f"{name} is {value!r}; expected a list, such as {name} = [{toml_text(value)}]")
    require(bool(value), f"{name} is empty; expected at least one value, or leave it out for the default")
    require_distinct(name, value)
    return value  # type: ignore[no-any-return]  # checked above


def require_distinct(name: str, values: Sequence[Any]) -> None:
    seen = set()
    for value in values:
        key = (type(value), repr(value))  # 1 and true are equal in Python, and not in TOML
        require(key not in seen, f"{name} has {value!r} twice; expected every value once")
        seen.add(key)


def is_length(name: str, value: Any) -> None:
    require(type(value) is int and value >= 1, f"{name} has {value!r}; expected lengths in tokens, integers from 1")


def is_precision(name: str, value: Any) -> None:
    require(
        isinstance(value, str) and value in DTYPE_OF_PRECISION,
        f"{name} has {value!r}{did_you_mean(value, DTYPE_OF_PRECISION)} Expected: {', '.join(DTYPE_OF_PRECISION)}",
    )


def is_target(name: str, value: Any) -> None:
    known = (ONNX_ONLY, *ENGINE_RUNTIMES)
    require(
        isinstance(value, str) and value in known,
        f"{name} has {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}",
    )


def is_gpu(name: str, value: Any) -> None:
    require(
        isinstance(value, str) and _GPU.fullmatch(value) is not None,
        f'{name} has {value!r}; expected architectures by their compute capability, such as "sm_90" for 9.0',
    )


# Checks of the values of one cell, by key; the axes are their plurals.
CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "seq_len": is_length,
    "precision": is_precision,
    "target": is_target,
    "gpu": is_gpu,
}


def model_of(value: Any, name: str) -> Model:
    require(
        isinstance(value, str),
        f'{name} has {value!r}; expected names such as "lsh", with fields after colons: "lsh:num_hashes=4"',
    )
    try:
        return model_from_text(value)
    except UserError as error:
        raise UserError(str(error).replace("--variants", name)) from error


def toml_text(value: Any) -> str:
    """A value as TOML, for the remedy of an error."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
