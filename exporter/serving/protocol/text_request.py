"""Texts in infer requests: BYTES inputs `text` and `context`, and the outputs that answer them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effexport.models.validation import shown
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.json_data import flat_elements
from effexport.serving.protocol.request_fields import (
    Fields,
    Wanted,
    objects_named,
    parameters_of,
    unread_bytes,
    wanted_from_fields,
)
from effexport.serving.protocol.signature import Signature
from effexport.serving.settings import MAX_TEXT_BYTES, MAX_TEXTS

BYTES = "BYTES"
TEXT, CONTEXT = "text", "context"
ANSWER, EMBEDDING = "answer", "embedding"


@dataclass(frozen=True)
class TextRequest(Wanted):
    """A request with texts instead of tensors. pairs: for each text, its second text or None.

    parameters: of the request, some of which are options of the task.
    """

    texts: tuple[str, ...]
    pairs: tuple[str | None, ...]
    parameters: Mapping[str, Any]


def has_texts(parsed: Fields, signature: Signature) -> bool:
    """Whether a request has an input `text` or `context` that is not a tensor of the model."""
    inputs = parsed.fields.get("inputs")
    names = [value.get("name") for value in inputs if isinstance(value, dict)] if isinstance(inputs, list) else []
    tensors = [tensor.name for tensor in signature.inputs]
    return any(name in names and name not in tensors for name in (TEXT, CONTEXT))


def text_request(parsed: Fields, outputs: Mapping[str, str]) -> TextRequest:
    """Check the texts of a request. outputs: their names and datatypes. Raises RequestError."""
    found: dict[str, tuple[str, ...]] = {}
    offset = 0
    for value in objects_named(parsed.fields, "inputs"):
        name = value["name"]
        if name not in (TEXT, CONTEXT):
            raise RequestError(f"a request has texts or tensors; this one has {TEXT!r} and {shown(name)}")
        if value.get("datatype") != BYTES:
            raise RequestError(f"input {name!r} has datatype {shown(value.get('datatype'))}; expected {BYTES}")
        shape = checked_shape(name, value.get("shape"))
        size = parameters_of(value, f"input {name!r}").get("binary_data_size")
        if size is None:
            found[name] = strings_from_json(value.get("data"), name, shape)
            continue
        if "data" in value:
            raise RequestError(f"input {name!r} has both data and the parameter binary_data_size; expected one")
        left = len(parsed.binary) - offset
        if type(size) is not int or not 0 <= size <= left:
            raise RequestError(f"input {name!r} has binary_data_size {shown(size)}; the body has {left} bytes left")
        found[name] = strings_from_binary(bytes(parsed.binary[offset : offset + size]), name, shape[0])
        offset += size
    if offset != len(parsed.binary):
        raise unread_bytes(len(parsed.binary), offset)
    if TEXT not in found:
        raise RequestError(f"the request has a {CONTEXT!r} and no {TEXT!r}, which is the question")
    texts, pairs = found[TEXT], found.get(CONTEXT)
    if pairs is not None and len(pairs) != len(texts):
        raise RequestError(f"{len(texts)} texts have {len(pairs)} contexts; expected one for each text")
    return TextRequest(*wanted_from_fields(parsed, outputs), texts, pairs or (None,) * len(texts), parsed.parameters)


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise RequestError(f"input {name!r} has shape {shown(shape)}; expected a list of integers: [n] or [n, 1]")
    if len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ([], [1]):
        raise RequestError(f"input {name!r} has shape {shown(shape)}; expected [n] or [n, 1], for n texts")
    if shape[0] > MAX_TEXTS:
        raise RequestError(f"input {name!r} has {shape[0]} texts; expected at most {MAX_TEXTS}: send several requests")
    return tuple(shape)


def strings_from_json(data: Any, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    if data is None:
        raise RequestError(f"input {name!r} has neither data nor the parameter binary_data_size")
    return checked_texts(flat_elements(data, name, shape), name)


def strings_from_binary(data: bytes, name: str, count: int) -> tuple[str, ...]:
    """Strings in UTF-8, each after its size in four bytes, little-endian."""
    texts: list[str] = []
    offset = 0
    for index in range(count):
        (size,) = struct.unpack_from("<I", data, offset) if offset + 4 <= len(data) else (len(data),)
        offset += 4 + size
        if offset > len(data):
            raise RequestError(
                f"binary data of input {name!r} ends within element {index}; expected {count} strings, each after its "
                "size in four bytes, little-endian"
            )
        try:
            texts.append(data[offset - size : offset].decode())
        except UnicodeDecodeError as error:
            raise RequestError(f"element {index} of input {name!r} is not UTF-8: {error.reason}") from None
    if offset != len(data):
        raise RequestError(f"binary data of input {name!r} has {len(data) - offset} bytes after its {count} strings")
    return checked_texts(texts, name)


def checked_texts(values: Sequence[Any], name: str) -> tuple[str, ...]:
    """Raises RequestError for what is not a string, or is longer than any text that a server should tokenise."""
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise RequestError(f"element {index} of {name!r} is {shown(value)}; expected a string")
        if len(value) > MAX_TEXT_BYTES // 4 and len(value.encode()) > MAX_TEXT_BYTES:
            raise RequestError(
                f"element {index} of {name!r} has {len(value)} characters; expected at most {MAX_TEXT_BYTES} bytes: "
                "split the text"
            )
    return tuple(values)
