"""The body of an infer request: JSON, which may be followed by the binary data of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES, numpy_dtype
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.json_data import BINARY_ONLY, array_from_json
from effexport.serving.protocol.signature import Signature, named, shown

if TYPE_CHECKING:
    from effexport.dtypes import Array, TensorInfo


@dataclass(frozen=True)
class InferRequest:
    """A request that the model can run. feeds: all inputs; those sent as binary data are views of the body.

    outputs: for each that the client wants, whether as bytes after the JSON instead of as numbers in it.
    timeout_s: how long the client wants to wait for the runner, or None.
    """

    id: str | None
    feeds: Mapping[str, Array]
    outputs: Mapping[str, bool]
    timeout_s: float | None

    @property
    def rows(self) -> int:
        return int(next(iter(self.feeds.values())).shape[0])


def request_from_body(body: bytes, header: str | None, signature: Signature) -> InferRequest:
    """Parse and check a request. header: Inference-Header-Content-Length, the size of the JSON; None: the whole body.

    Raises RequestError for anything that this model cannot run.
    """
    length = json_length(body, header)
    fields = parsed_object(body[:length] if header is not None else body)
    identifier = fields.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise RequestError(f"id is {shown(identifier)}; expected a string")
    parameters = parameters_of(fields, "the request")
    feeds = feeds_from_fields(fields, memoryview(body)[length:], signature)
    outputs = outputs_from_fields(fields, parameters, signature)
    return InferRequest(identifier, signature.complete(feeds), outputs, timeout_from_parameters(parameters))


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

    try:
        fields = orjson.loads(text)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None
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


def feeds_from_fields(fields: Mapping[str, Any], binary: memoryview, signature: Signature) -> dict[str, Array]:
    if "inputs" not in fields:
        raise RequestError(f"the request has no inputs; expected: {', '.join(map(str, signature.inputs))}")
    feeds: dict[str, Array] = {}
    offset = 0
    for value in objects_named(fields, "inputs"):
        tensor = named(signature.inputs, value["name"], "input")
        datatype, expected = value.get("datatype"), DTYPES[tensor.dtype].protocol
        if datatype != expected:
            raise RequestError(f"input {tensor.name!r} has datatype {shown(datatype)}; expected {expected}")
        shape = signature.checked_shape(tensor, value.get("shape"))
        size = parameters_of(value, f"input {tensor.name!r}").get("binary_data_size")
        if size is None:
            if "data" not in value:
                raise RequestError(f"input {tensor.name!r} has neither data nor the parameter binary_data_size")
            feeds[tensor.name] = array_from_json(value["data"], tensor, shape)
            continue
        if "data" in value:
            raise RequestError(f"input {tensor.name!r} has both data and the parameter binary_data_size; expected one")
        feeds[tensor.name] = array_from_binary(binary, offset, size, tensor, shape)
        offset += size
    if offset != len(binary):
        raise RequestError(f"{len(binary)} bytes follow the JSON of the request; its inputs account for {offset}")
    return feeds


def array_from_binary(data: memoryview, offset: int, size: Any, tensor: TensorInfo, shape: tuple[int, ...]) -> Array:
    """The input as a view of the body, or as a copy if its bytes are not aligned to the element size."""
    import numpy as np

    dtype = numpy_dtype(tensor.dtype)
    expected = math.prod(shape) * dtype.itemsize
    if type(size) is not int or size != expected:
        raise RequestError(
            f"input {tensor.name!r} has binary_data_size {shown(size)}; expected {expected}, the bytes of "
            f"{tensor.dtype} {list(shape)}"
        )
    if offset + size > len(data):
        raise RequestError(
            f"input {tensor.name!r} needs {size} bytes of binary data; the body has {max(0, len(data) - offset)} left: "
            "send Inference-Header-Content-Length, and all of the data after the JSON"
        )
    raw = np.frombuffer(data, np.uint8, size, offset)
    if tensor.dtype == "bool" and raw.max() > 1:
        raise RequestError(f"binary data of input {tensor.name!r} holds {raw.max()}; expected 0 and 1 for BOOL")
    array: Array = np.require(raw.view(dtype), requirements="A").reshape(shape)
    return array


def outputs_from_fields(
    fields: Mapping[str, Any], parameters: Mapping[str, Any], signature: Signature
) -> dict[str, bool]:
    """The outputs that the client names, in its order; all outputs if it names none."""
    default = flag(parameters, "binary_data_output", False, "the request")
    if fields.get("outputs") in (None, []):
        wanted = {tensor.name: default for tensor in signature.outputs}
    else:
        wanted = {}
        for value in objects_named(fields, "outputs"):
            owner = f"output {shown(value['name'])}"
            wanted[value["name"]] = flag(parameters_of(value, owner), "binary_data", default, owner)
    for name, binary in wanted.items():
        datatype = DTYPES[named(signature.outputs, name, "output").dtype].protocol
        if datatype in BINARY_ONLY and not binary:
            raise RequestError(
                f"output {name!r} is {datatype}, which JSON cannot represent; ask for it with binary_data: true"
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
