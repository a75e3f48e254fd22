"""The published JSON Schema of report.json, and a check against it that needs no library.

Only the keywords that the schema uses are understood; a test compares the answers with a full validator's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def schema_text() -> str:
    return resources.files("effexport.report").joinpath("report.schema.json").read_text(encoding="utf-8")


@functools.cache
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(schema_text())
    return loaded


def first_problem(value: Any) -> str | None:
    """What is wrong with a report, as `checks[3].status is 'maybe'; expected …`; None for a report that is right."""
    return next(_problems(value, schema(), ""), None)


def _problems(value: Any, rule: Mapping[str, Any], place: str) -> Iterator[str]:
    where = place or "the report"
    if "$ref" in rule:
        yield from _problems(value, schema()["$defs"][rule["$ref"].rsplit("/", 1)[1]], place)
        return
    if "anyOf" in rule:
        answers = [list(_problems(value, one, place)) for one in rule["anyOf"]]
        if all(answers):
            # the first alternative is what is meant; the others are for special values
            yield answers[0][0]
        return
    allowed = [rule["const"]] if "const" in rule else rule.get("enum")
    if allowed is not None and not any(value == one and type(value) is type(one) for one in allowed):
        yield f"{where} is {_shown(value)}; expected {', '.join(map(repr, allowed))}"
        return
    types = rule.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        yield f"{where} is {_shown(value)}; expected {' or '.join(types)}"
        return
    if "minimum" in rule and not value >= rule["minimum"]:
        yield f"{where} is {_shown(value)}; expected at least {rule['minimum']}"
    if isinstance(value, dict):
        yield from _problems_of_object(value, rule, place)
    elif isinstance(value, list) and "items" in rule:
        for index, item in enumerate(value):
            yield from _problems(item, rule["items"], f"{place}[{index}]")


def _problems_of_object(value: dict[str, Any], rule: Mapping[str, Any], place: str) -> Iterator[str]:
    where = place or "the report"
    properties = rule.get("properties", {})
    rest = rule.get("additionalProperties", True)
    for name in rule.get("required", ()):
        if name not in value:
            yield f"{where} has no {name}"
    for name, item in value.items():
        inside = f"{place}.{name}" if place else name
        if name in properties:
            yield from _problems(item, properties[name], inside)
        elif rest is False:
            yield f"{where} has {name!r}, which no report has"
        elif isinstance(rest, dict):
            yield from _problems(item, rest, inside)


def _is(value: Any, name: str) -> bool:
    """True and False are no numbers, though Python says so."""
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES[name])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
