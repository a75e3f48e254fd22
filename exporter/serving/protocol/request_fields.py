"""The body of a request: JSON, which may be followed by binary data, and what it says about the answer."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from effexport.models.validation import shown
from effexport.serving.protocol.errors import TOO_LARGE, RequestError
from effexport.serving.protocol.signature import BINARY_ONLY, unknown_name

# Lists, objects and strings of a request, roughly. Nested tensors have a list for each row.
MAX_JSON_PIECES = 1 << 21


@dataclass(frozen=True)
class Fields:
    """The parts of the body of a request: its JSON, the parameters of that, and the binary data after it."""

    fields: Mapping[str, Any]
    parameters: Mapping[str, Any]
    binary: memoryview


def fields_from_body(body: bytes, header: str | None) -> Fields:
    """Parse a request. header: Inference-Header-Content-Length, the size of the JSON; None: the whole body.

    Raises RequestError for a body that is not a JSON object and data.
    """
    length = json_length(body, header)
    fields = parsed_object(body[:length] if header is not None else body)
    return Fields(fields, parameters_of(fields, "the request"), memoryview(body)[length:])


@dataclass(frozen=True)
class Wanted:
    """What the client wants. id: to be returned.

    outputs: for each that the client wants, whether as bytes after the JSON instead of as numbers in it.
    timeout_s: how long the client wants to wait for the runner, or None.
    """

    id: str | None
    outputs: Mapping[str, bool]
    timeout_s: float | None


def json_length(body: bytes, header: str | None) -> int:
    if header is None:
        return len(body)
    # int() would also accept "+1", " 1", "1_0", digits of other scripts, and any number of digits
    if not (header.isascii() and header.isdigit() and len(header) <= 18):
        raise RequestError(f"Inference-Header-Content-Length is {shown(header)}; expected a number of bytes")
    length = int(header)
    if not 0 < length <= len(body):
        raise RequestError(
            f"Inference-Header-Content-Length is {length}; expected 1 to {len(body)}, the size of the body"
        )
    return length


def parsed_object(text: bytes, expected: str = "a JSON object with inputs") -> dict[str, Any]:
    """The JSON object in the body of a request. Raises RequestError, which says what was expected."""
    import orjson

    # In memory, a list that is two bytes of JSON takes 56, so 64 MiB of them would be 1.7 GB and take seconds.
    pieces = sum(map(text.count, (b"[", b"{", b'"')))
    if pieces > MAX_JSON_PIECES:
        raise RequestError(
            f"the JSON of the request has {pieces} brackets and quotation marks; expected at most {MAX_JSON_PIECES}: "
            "send flat lists, binary data, or several requests",
            TOO_LARGE,
        )
    # no other thread runs meanwhile; and looking for garbage among what was just parsed would triple the time
    gc.disable()
    try:
        fields = orjson.loads(text)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None
    finally:
        gc.enable()
    if not isinstance(fields, dict):
        raise RequestError(f"the request is {shown(fields)}; expected {expected}")
    return fields


def parameters_of(fields: Mapping[str, Any], owner: str) -> Mapping[str, Any]:
    parameters = fields.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise RequestError(f"parameters of {owner} are {shown(parameters)}; expected an object")
    for name in ("shared_memory_region", "classification", "sequence_id"):
        if parameters.get(name):
            raise RequestError(f"{owner} has the parameter {name}, which this server does not support; leave it out")
    return parameters


def objects_named(fields: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of objects under `key`, each with a different name. Raises RequestError."""
    values = fields[key]
    if not isinstance(values, list) or not values:
        raise RequestError(f"{key} are {shown(values)}; expected a list of at least one object")
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise RequestError(f"{key} hold {shown(value)}; expected an object with a name")
    seen: set[str] = set()
    for value in values:
        if value["name"] in seen:
            raise RequestError(f"{key} name {shown(value['name'])} twice")
        seen.add(value["name"])
    return values


def unread_bytes(given: int, accounted: int) -> RequestError:
    return RequestError(f"{given} bytes follow the JSON of the request; its inputs account for {accounted}")


def wanted_from_fields(
    parsed: Fields, datatypes: Mapping[str, str]
) -> tuple[str | None, Mapping[str, bool], float | None]:
    """The fields of Wanted. datatypes: of the outputs that there are, by name."""
    identifier = parsed.fields.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise RequestError(f"id is {shown(identifier)}; expected a string")
    outputs = outputs_from_fields(parsed.fields, parsed.parameters, datatypes)
    return identifier, outputs, timeout_from_parameters(parsed.parameters)


def outputs_from_fields(
    fields: Mapping[str, Any], parameters: Mapping[str, Any], datatypes: Mapping[str, str]
) -> dict[str, bool]:
    """The outputs that the client names, in its order; all outputs if it names none."""
    default = flag(parameters, "binary_data_output", False, "the request")
    if fields.get("outputs") in (None, []):
        wanted = dict.fromkeys(datatypes, default)
    else:
        wanted = {}
        for value in objects_named(fields, "outputs"):
            owner = f"output {shown(value['name'])}"
            wanted[value["name"]] = flag(parameters_of(value, owner), "binary_data", default, owner)
    for name, binary in wanted.items():
        if name not in datatypes:
            raise unknown_name(name, list(datatypes), "output")
        if datatypes[name] in BINARY_ONLY and not binary:
            raise RequestError(
                f"output {name!r} is {datatypes[name]}, which JSON cannot represent; ask for it with binary_data: true"
            )
    return wanted


def flag(parameters: Mapping[str, Any], name: str, default: bool, owner: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{owner} has {name} {shown(value)}; expected true or false")
    return value


def timeout_from_parameters(parameters: Mapping[str, Any]) -> float | None:
    """The parameter `timeout`, which Triton's clients send in microseconds, in seconds."""
    value = parameters.get("timeout")
    if value is None or (type(value) is int and value == 0):
        return None
    if type(value) is not int or value < 0:
        raise RequestError(f"timeout is {shown(value)}; expected a number of microseconds")
    return value / 1e6
