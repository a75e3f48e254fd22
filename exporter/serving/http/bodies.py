"""Bodies of the KServe V2 protocol: requests and answers, JSON and binary data, tensors and texts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import orjson

from effexport.base.dtypes import DTYPES, Array, TensorInfo, numpy_dtype
from effexport.models.validation import shown
from effexport.serving.engine.errors import TOO_LARGE, RequestError
from effexport.serving.engine.signature import (
    BINARY_ONLY,
    STRING,
    TEXTS,
    ServedSignature,
    objects,
    protocol_type,
    texts_of_inputs,
)
from effexport.tasks.sampling import unknown_name

# Lists, objects and strings of a request, roughly. Nested tensors have a list for each row.
MAX_JSON_PIECES = 1 << 21


@dataclass(frozen=True)
class InferRequest:
    """A request that a model can run: with tensors, or with texts instead. id: to be returned.

    outputs: for each that the client wants, whether as bytes after the JSON instead of as numbers in it.
    timeout_s: how long the client wants to wait for the runner, or None.
    feeds: all inputs; those sent as binary data are views of the body. texts: each with its second text or None.
    parameters: some of which are options of the task.
    """

    id: str | None
    outputs: Mapping[str, bool]
    timeout_s: float | None
    feeds: Mapping[str, Array] = field(default_factory=dict)
    texts: Sequence[tuple[str, str | None]] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


def infer_request(
    body: bytes, length: int, signature: ServedSignature, text_outputs: Callable[[], Mapping[str, str]]
) -> InferRequest:
    """Check a request. length: of its JSON, after which binary data may follow.

    text_outputs: of a request with texts, names and datatypes; raises RequestError for a model that reads none.
    Raises RequestError for anything that this model cannot run.
    """
    fields = parsed_object(body[:length])
    parameters = parameters_of(fields, "the request")
    if "inputs" not in fields:
        raise RequestError(f"the request has no inputs; expected: {', '.join(map(str, signature.inputs))}")
    tensors = {tensor.name: tensor for tensor in (*TEXTS, *signature.inputs)}
    inputs: dict[str, Array] = {}
    left = memoryview(body)[length:]
    for value in objects_named(fields, "inputs"):
        if value["name"] not in tensors:
            raise unknown_name("input", value["name"], [tensor.name for tensor in signature.inputs])
        tensor = tensors[value["name"]]
        inputs[tensor.name], size = input_from_fields(value, tensor, signature, left)
        left = left[size:]
    if left:
        raise RequestError(
            f"{len(body) - length} bytes follow the JSON of the request; its inputs account for "
            f"{len(body) - length - len(left)}"
        )
    texts: Sequence[tuple[str, str | None]] = ()
    if any(tensors[name] in TEXTS for name in inputs):
        datatypes, texts, inputs = text_outputs(), texts_of_inputs(inputs), {}
    else:
        datatypes = {tensor.name: protocol_type(tensor.dtype) for tensor in signature.outputs}
        inputs = signature.complete(inputs)
    # Triton's clients send the timeout in microseconds
    timeout = parameters.get("timeout")
    if timeout is not None and (type(timeout) is not int or timeout < 0):
        raise RequestError(f"timeout is {shown(timeout)}; expected a number of microseconds")
    outputs = outputs_from_fields(fields, parameters, datatypes)
    return InferRequest(id_of(fields), outputs, timeout / 1e6 if timeout else None, inputs, texts, parameters)


def input_from_fields(
    value: Mapping[str, Any], tensor: TensorInfo, signature: ServedSignature, left: memoryview
) -> tuple[Array, int]:
    """An input, and the size of its part of the binary data. left: the binary data that no input before it has."""
    datatype, owner = protocol_type(tensor.dtype), f"input {tensor.name!r}"
    if value.get("datatype") != datatype:
        raise RequestError(f"{owner} has datatype {shown(value.get('datatype'))}; expected {datatype}")
    is_text = tensor.dtype == STRING
    shape = (shape_of_texts if is_text else signature.checked_shape)(tensor, value.get("shape"))
    size = parameters_of(value, owner).get("binary_data_size")
    if size is None and "data" not in value:
        raise RequestError(f"{owner} has neither data nor the parameter binary_data_size")
    if size is not None and "data" in value:
        raise RequestError(f"{owner} has both data and the parameter binary_data_size; expected one")
    if size is None:
        flat = flat_elements(value["data"], tensor.name, shape)
        array = objects(flat) if is_text else array_from_json(flat, tensor, shape)
    elif type(size) is not int or not 0 <= size <= len(left):
        raise RequestError(
            f"{owner} has binary_data_size {shown(size)}; the body has {len(left)} bytes left: send "
            "Inference-Header-Content-Length, and all of the data after the JSON"
        )
    else:
        array = (strings_from_binary if is_text else array_from_binary)(tensor, shape, left[:size])
    # NaN and infinity, to which no model has an answer; JSON has them as too large numbers
    if array.dtype.kind in "fV" and not np.isfinite(array).all():
        raise RequestError(
            f"data of {owner} holds NaN, infinity, or a number outside of {datatype}; expected finite numbers"
        )
    return array, size or 0


def json_length(body: bytes, header: str | None) -> int:
    """The size of the JSON. header: Inference-Header-Content-Length; None: the whole body. Raises RequestError."""
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
    seen: set[str] = set()
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise RequestError(f"{key} hold {shown(value)}; expected an object with a name")
        if value["name"] in seen:
            raise RequestError(f"{key} name {shown(value['name'])} twice")
        seen.add(value["name"])
    return values


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
            raise unknown_name("output", name, list(datatypes))
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


def array_from_json(flat: list[Any], tensor: TensorInfo, shape: tuple[int, ...]) -> Array:
    """The elements as an array of a shape that has as many. Raises RequestError for a wrong type, number or range."""
    datatype = DTYPES[tensor.dtype].protocol
    if datatype in BINARY_ONLY:
        raise RequestError(f"input {tensor.name!r} is {datatype}, which JSON cannot represent; send it as binary data")
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
    return array.reshape(shape)


def pieces(flat: list[Any]) -> Iterator[list[Any]]:
    return (flat[start : start + PIECE] for start in range(0, len(flat), PIECE))


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


def array_from_binary(tensor: TensorInfo, shape: tuple[int, ...], data: memoryview) -> Array:
    """The input as a view of the body, or as a copy if its bytes are not aligned to the element size."""
    dtype = numpy_dtype(tensor.dtype)
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise RequestError(
            f"input {tensor.name!r} has binary_data_size {len(data)}; expected {expected}, the bytes of "
            f"{tensor.dtype} {list(shape)}"
        )
    raw = np.frombuffer(data, np.uint8)
    if tensor.dtype == "bool" and raw.max() > 1:
        raise RequestError(f"binary data of input {tensor.name!r} holds {raw.max()}; expected 0 and 1 for BOOL")
    array: Array = np.require(raw.view(dtype), requirements="A").reshape(shape)
    return array


def shape_of_texts(tensor: TensorInfo, shape: Any) -> tuple[int, ...]:
    """The shape of texts, [n] or [n, 1], in a request. Raises RequestError."""
    are_sizes = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not are_sizes or min(shape, default=0) < 1 or shape[1:] not in ([], [1]):
        raise RequestError(f"input {tensor.name!r} has shape {shown(shape)}; expected [n] or [n, 1], for n texts")
    return tuple(shape)


def strings_from_binary(tensor: TensorInfo, shape: tuple[int, ...], view: memoryview) -> Array:
    """Strings in UTF-8, each after its size in four bytes, little-endian."""
    name, count, data = tensor.name, shape[0], bytes(view)
    texts: list[bytes] = []
    end = 0
    for index in range(count):
        start = end + 4
        end = start + int.from_bytes(data[end:start], "little")
        if end > len(data):
            raise RequestError(
                f"binary data of input {name!r} ends within element {index}; expected {count} strings, each after its "
                "size in four bytes, little-endian"
            )
        texts.append(data[start:end])
    if end != len(data):
        raise RequestError(f"binary data of input {name!r} has {len(data) - end} bytes after its {count} strings")
    return objects(texts)


# Where numbers are filled in. In JSON, this byte stands nowhere else.
GAP = b"\0"


def answer_from_outputs(
    wanted: InferRequest, outputs: Mapping[str, Array], name: str, version: str
) -> tuple[bytes, int | None]:
    """The body of an answer, and the size of its JSON if binary data follows. outputs: texts are objects, in UTF-8.

    Raises RequestError for NaN and infinity that would be sent as JSON.
    """
    described: list[dict[str, Any]] = []
    binary: list[bytes | memoryview] = []
    numbers: list[list[bytes | memoryview]] = []
    for output, is_binary in wanted.outputs.items():
        value = outputs[output]
        is_text = value.dtype == object
        datatype = protocol_type(STRING if is_text else value.dtype.name)
        entry: dict[str, Any] = {"name": output, "datatype": datatype, "shape": list(value.shape)}
        if is_binary:
            binary.append(sized_strings(value) if is_text else bytes_of(value))
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        elif is_text:
            entry["data"] = [text.decode() for text in value.flat]
        else:
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise RequestError(
                    f"output {output!r} contains NaN or infinity, which JSON cannot represent; ask for binary data, "
                    "and see whether the inputs are too large for the model"
                )
            entry["data"] = orjson.Fragment(GAP)
            numbers.append(numbers_as_json(value.reshape(-1)))
        described.append(entry)
    fields: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": described}
    if wanted.id is not None:
        fields["id"] = wanted.id
    first, *others = orjson.dumps(fields).split(GAP)
    text = [first, *chain.from_iterable((*filled, after) for filled, after in zip(numbers, others, strict=True))]
    return b"".join([*text, *binary]), sum(map(len, text)) if binary else None


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


def sized_strings(strings: Array) -> bytes:
    """BYTES as binary data: each string after its size in four bytes, little-endian."""
    return b"".join(part for text in strings.flat for part in (len(text).to_bytes(4, "little"), text))
