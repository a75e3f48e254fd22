"""Bodies of the KServe V2 protocol: requests and answers, JSON and binary data, tensors and texts."""

from __future__ import annotations

import gc
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import orjson

from effexport.base.dtypes import DTYPES, numpy_dtype
from effexport.models.validation import shown
from effexport.serving.engine.errors import TOO_LARGE, RequestError
from effexport.serving.engine.settings import MAX_TEXT_BYTES, MAX_TEXTS
from effexport.serving.engine.signature import BINARY_ONLY, CONTEXT, TEXT, ServedSignature, decoded, named, unknown_name

if TYPE_CHECKING:
    from effexport.base.dtypes import Array, TensorInfo
    from effexport.serving.http.models import ServedModel


Value = TypeVar("Value")
# How the JSON and the binary data of an input are read.
Reader = tuple[Callable[[Any], Value], Callable[[memoryview, Any], Value]]
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
class InferRequest:
    """A request that a model can run: with tensors, or with texts instead. id: to be returned.

    outputs: for each that the client wants, whether as bytes after the JSON instead of as numbers in it.
    timeout_s: how long the client wants to wait for the runner, or None.
    feeds: all inputs; those sent as binary data are views of the body. texts: each with its second text or None.
    parameters: of a request with texts, some of which are options of the task.
    """

    id: str | None
    outputs: Mapping[str, bool]
    timeout_s: float | None
    feeds: Mapping[str, Array] = field(default_factory=dict)
    texts: Sequence[tuple[str, str | None]] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


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


def wanted_from_fields(
    parsed: Fields, datatypes: Mapping[str, str]
) -> tuple[str | None, Mapping[str, bool], float | None]:
    """id, outputs and timeout_s of a request. datatypes: of the outputs that there are, by name."""
    # Triton's clients send the timeout in microseconds
    timeout = parsed.parameters.get("timeout")
    if timeout is not None and (type(timeout) is not int or timeout < 0):
        raise RequestError(f"timeout is {shown(timeout)}; expected a number of microseconds")
    outputs = outputs_from_fields(parsed.fields, parsed.parameters, datatypes)
    return id_of(parsed.fields), outputs, timeout / 1e6 if timeout else None


def id_of(fields: Mapping[str, Any]) -> str | None:
    identifier = fields.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise RequestError(f"id is {shown(identifier)}; expected a string")
    return identifier


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


# Elements of one call into C, which lets no other thread run: a few milliseconds.
PIECE = 1 << 16
# Element types as Python reads them from JSON. A bool is an int in Python, but not in the protocol.
_ELEMENTS: dict[str, tuple[set[type], str]] = {
    "BOOL": ({bool}, "true or false"),
    "INT32": ({int}, "integers"),
    "INT64": ({int}, "integers"),
    "FP32": ({int, float}, "numbers"),
    "FP64": ({int, float}, "numbers"),
}


def array_from_json(data: Any, tensor: TensorInfo, shape: tuple[int, ...]) -> Array:
    """The elements as an array. shape: already checked. Raises RequestError for a wrong type, number or range."""
    datatype = DTYPES[tensor.dtype].protocol
    if datatype in BINARY_ONLY:
        raise RequestError(f"input {tensor.name!r} is {datatype}, which JSON cannot represent; send it as binary data")
    flat = flat_elements(data, tensor.name, shape)
    accepted, expected = _ELEMENTS[datatype]
    others = set[type]().union(*(set(map(type, piece)) for piece in pieces(flat))) - accepted
    if others:
        first = next(value for value in flat if type(value) in others)
        raise RequestError(f"data of input {tensor.name!r} holds {shown(first)}; expected {expected} for {datatype}")
    try:
        with np.errstate(over="ignore"):
            array = np.concatenate([np.array(piece, dtype=tensor.dtype) for piece in pieces(flat)])
    except OverflowError:
        raise RequestError(f"data of input {tensor.name!r} holds a number outside of {datatype}") from None
    check_finite_input(tensor.name, array)
    return array.reshape(shape)


def pieces(flat: list[Any]) -> Iterator[list[Any]]:
    return (flat[start : start + PIECE] for start in range(0, len(flat), PIECE))


def check_finite_input(name: str, array: Array) -> None:
    """Raises RequestError for NaN and infinity, to which no model has an answer; JSON has them as too large numbers."""
    if array.dtype.kind in "fV" and not np.isfinite(array).all():
        raise RequestError(
            f"data of input {name!r} holds NaN, infinity, or a number outside of {DTYPES[array.dtype.name].protocol}; "
            "expected finite numbers"
        )


def flat_elements(data: Any, name: str, shape: tuple[int, ...]) -> list[Any]:
    """The elements in row-major order. Raises RequestError if they do not match the shape."""
    if not isinstance(data, list):
        raise RequestError(f"data of input {name!r} is {shown(data)}; expected a list")
    count = math.prod(shape)
    if not data or type(data[0]) is not list:
        if len(data) != count:
            raise RequestError(f"data of input {name!r} has {len(data)} elements; its shape {list(shape)} has {count}")
        return data
    level: list[Any] = [data]
    for size in shape:
        if not all(type(item) is list and len(item) == size for item in level):
            raise RequestError(f"nested data of input {name!r} does not have its shape, {list(shape)}")
        level = list(chain.from_iterable(level))
    return level


def infer_request(parsed: Fields, signature: ServedSignature) -> InferRequest:
    """Check a request. Raises RequestError for anything that this model cannot run."""
    if "inputs" not in parsed.fields:
        raise RequestError(f"the request has no inputs; expected: {', '.join(map(str, signature.inputs))}")

    def reader_of(value: Mapping[str, Any]) -> Reader[Array]:
        tensor = named(signature.inputs, value["name"], "input")
        check_datatype(value, DTYPES[tensor.dtype].protocol)
        shape = signature.checked_shape(tensor, value.get("shape"))
        return partial(array_from_json, tensor=tensor, shape=shape), partial(array_from_binary, tensor, shape)

    feeds = read_inputs(parsed, reader_of)
    datatypes = {tensor.name: DTYPES[tensor.dtype].protocol for tensor in signature.outputs}
    return InferRequest(*wanted_from_fields(parsed, datatypes), feeds=signature.complete(feeds))


def read_inputs(parsed: Fields, reader_of: Callable[[Mapping[str, Any]], Reader[Value]]) -> dict[str, Value]:
    """The inputs of a request by name. reader_of: checks an input, and returns how its JSON and its binary data are
    read; the latter gets the binary data that is left, and the size of its part."""
    found: dict[str, Value] = {}
    left = parsed.binary
    for value in objects_named(parsed.fields, "inputs"):
        from_json, from_binary = reader_of(value)
        owner = f"input {value['name']!r}"
        size = parameters_of(value, owner).get("binary_data_size")
        if size is None and "data" not in value:
            raise RequestError(f"{owner} has neither data nor the parameter binary_data_size")
        if size is not None and "data" in value:
            raise RequestError(f"{owner} has both data and the parameter binary_data_size; expected one")
        found[value["name"]] = from_json(value["data"]) if size is None else from_binary(left, size)
        left = left[size or 0 :]
    if left:
        accounted = len(parsed.binary) - len(left)
        raise RequestError(
            f"{len(parsed.binary)} bytes follow the JSON of the request; its inputs account for {accounted}"
        )
    return found


def check_datatype(value: Mapping[str, Any], expected: str) -> None:
    if value.get("datatype") != expected:
        raise RequestError(f"input {value['name']!r} has datatype {shown(value.get('datatype'))}; expected {expected}")


def array_from_binary(tensor: TensorInfo, shape: tuple[int, ...], data: memoryview, size: Any) -> Array:
    """The input as a view of the body, or as a copy if its bytes are not aligned to the element size."""
    dtype = numpy_dtype(tensor.dtype)
    expected = math.prod(shape) * dtype.itemsize
    if type(size) is not int or size != expected:
        raise RequestError(
            f"input {tensor.name!r} has binary_data_size {shown(size)}; expected {expected}, the bytes of "
            f"{tensor.dtype} {list(shape)}"
        )
    if size > len(data):
        raise RequestError(
            f"input {tensor.name!r} needs {size} bytes of binary data; the body has {len(data)} left: "
            "send Inference-Header-Content-Length, and all of the data after the JSON"
        )
    raw = np.frombuffer(data, np.uint8, size)
    if tensor.dtype == "bool" and raw.max() > 1:
        raise RequestError(f"binary data of input {tensor.name!r} holds {raw.max()}; expected 0 and 1 for BOOL")
    array: Array = np.require(raw.view(dtype), requirements="A").reshape(shape)
    check_finite_input(tensor.name, array)
    return array


def has_texts(parsed: Fields, signature: ServedSignature) -> bool:
    """True if a request has an input `text` or `context` that is not a tensor of the model."""
    inputs = parsed.fields.get("inputs")
    names = [value.get("name") for value in inputs if isinstance(value, dict)] if isinstance(inputs, list) else []
    tensors = [tensor.name for tensor in signature.inputs]
    return any(name in names and name not in tensors for name in (TEXT, CONTEXT))


def text_request(parsed: Fields, outputs: Mapping[str, str]) -> InferRequest:
    """Check the texts of a request. outputs: their names and datatypes. Raises RequestError."""

    def reader_of(value: Mapping[str, Any]) -> Reader[tuple[str, ...]]:
        name = value["name"]
        if name not in (TEXT, CONTEXT):
            raise RequestError(f"a request has texts or tensors; this one has {TEXT!r} and {shown(name)}")
        check_datatype(value, "BYTES")
        shape = checked_shape(name, value.get("shape"))
        return (
            lambda data: checked_texts(flat_elements(data, name, shape), name),
            partial(strings_from_binary, name, shape[0]),
        )

    found = read_inputs(parsed, reader_of)
    if TEXT not in found:
        raise RequestError(f"the request has a {CONTEXT!r} and no {TEXT!r}, which is the question")
    texts, pairs = found[TEXT], found.get(CONTEXT)
    if pairs is not None and len(pairs) != len(texts):
        raise RequestError(f"{len(texts)} texts have {len(pairs)} contexts; expected one for each text")
    texts_of_pairs = tuple(zip(texts, pairs or (None,) * len(texts), strict=True))
    wanted = wanted_from_fields(parsed, outputs)
    return InferRequest(*wanted, texts=texts_of_pairs, parameters=parsed.parameters)


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise RequestError(f"input {name!r} has shape {shown(shape)}; expected a list of integers: [n] or [n, 1]")
    if len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ([], [1]):
        raise RequestError(f"input {name!r} has shape {shown(shape)}; expected [n] or [n, 1], for n texts")
    if shape[0] > MAX_TEXTS:
        raise RequestError(f"input {name!r} has {shape[0]} texts; expected at most {MAX_TEXTS}: send several requests")
    return tuple(shape)


def strings_from_binary(name: str, count: int, left: memoryview, size: Any) -> tuple[str, ...]:
    """Strings in UTF-8, each after its size in four bytes, little-endian."""
    if type(size) is not int or not 0 <= size <= len(left):
        raise RequestError(f"input {name!r} has binary_data_size {shown(size)}; the body has {len(left)} bytes left")
    data = bytes(left[:size])
    texts: list[str] = []
    offset = 0
    for index in range(count):
        (length,) = struct.unpack_from("<I", data, offset) if offset + 4 <= len(data) else (len(data),)
        offset += 4 + length
        if offset > len(data):
            raise RequestError(
                f"binary data of input {name!r} ends within element {index}; expected {count} strings, each after its "
                "size in four bytes, little-endian"
            )
        texts.append(decoded(data[offset - length : offset], f"element {index} of {name!r}"))
    if offset != len(data):
        raise RequestError(f"binary data of input {name!r} has {len(data) - offset} bytes after its {count} strings")
    return tuple(texts)


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


def wanted_from_body(body: bytes, header: str | None, model: ServedModel) -> InferRequest:
    """Read a request with tensors or with texts. header: see `fields_from_body`. Raises RequestError."""
    parsed = fields_from_body(body, header)
    if has_texts(parsed, model.signature):
        return text_request(parsed, model.texts.outputs)
    return infer_request(parsed, model.signature)


# Where numbers are filled in. In JSON, this byte stands nowhere else.
GAP = b"\0"


@dataclass(frozen=True)
class Answer:
    """The body of an answer. header_length: size of its JSON if binary data follows, else None."""

    body: bytes
    header_length: int | None


def answer_from_outputs(
    wanted: InferRequest, outputs: Mapping[str, Array | Sequence[bytes]], name: str, version: str
) -> Answer:
    """outputs: arrays, or strings in UTF-8. Raises RequestError for NaN and infinity that would be sent as JSON."""
    described: list[dict[str, Any]] = []
    binary: list[bytes | memoryview] = []
    numbers: list[list[bytes | memoryview]] = []
    for output, is_binary in wanted.outputs.items():
        value = outputs[output]
        if isinstance(value, Sequence):
            entry: dict[str, Any] = {"name": output, "datatype": "BYTES", "shape": [len(value)]}
        else:
            entry = {"name": output, "datatype": DTYPES[value.dtype.name].protocol, "shape": list(value.shape)}
        if is_binary:
            binary.append(sized_strings(value) if isinstance(value, Sequence) else bytes_of(value))
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        elif isinstance(value, Sequence):
            entry["data"] = [text.decode() for text in value]
        else:
            check_finite(output, value)
            entry["data"] = orjson.Fragment(GAP)
            numbers.append(numbers_as_json(value.reshape(-1)))
        described.append(entry)
    fields: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": described}
    if wanted.id is not None:
        fields["id"] = wanted.id
    first, *others = orjson.dumps(fields).split(GAP)
    text = [first, *chain.from_iterable((*filled, after) for filled, after in zip(numbers, others, strict=True))]
    return Answer(b"".join([*text, *binary]), sum(map(len, text)) if binary else None)


def numbers_as_json(numbers: Array) -> list[bytes | memoryview]:
    """A list of numbers as parts of JSON, because no other thread runs while orjson writes one of them."""
    parts: list[bytes | memoryview] = []
    for start in range(0, len(numbers), PIECE):
        text = orjson.dumps(numbers[start : start + PIECE], option=orjson.OPT_SERIALIZE_NUMPY)
        parts += [memoryview(text)[1:-1], b","]
    return [b"[", *parts[:-1], b"]"]


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array as a view, so that the only copy is into the body."""
    # as uint8, because memoryview lacks some types
    view: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return view


def sized_strings(strings: Sequence[bytes]) -> bytes:
    """BYTES as binary data: each string after its size in four bytes, little-endian."""
    return b"".join(part for text in strings for part in (len(text).to_bytes(4, "little"), text))


def check_finite(name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(
            f"output {name!r} contains NaN or infinity, which JSON cannot represent; ask for binary data, and see "
            "whether the inputs are too large for the model"
        )
