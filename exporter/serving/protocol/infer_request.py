"""The tensors of an infer request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES, numpy_dtype
from effexport.models.validation import shown
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.json_data import array_from_json, check_finite_input
from effexport.serving.protocol.request_fields import (
    Fields,
    Wanted,
    objects_named,
    parameters_of,
    unread_bytes,
    wanted_from_fields,
)
from effexport.serving.protocol.signature import Signature, named

if TYPE_CHECKING:
    from effexport.dtypes import Array, TensorInfo


@dataclass(frozen=True)
class InferRequest(Wanted):
    """A request that the model can run. feeds: all inputs; those sent as binary data are views of the body."""

    feeds: Mapping[str, Array]


def infer_request(parsed: Fields, signature: Signature) -> InferRequest:
    """Check a request. Raises RequestError for anything that this model cannot run."""
    feeds = feeds_from_fields(parsed.fields, parsed.binary, signature)
    datatypes = {tensor.name: DTYPES[tensor.dtype].protocol for tensor in signature.outputs}
    return InferRequest(*wanted_from_fields(parsed, datatypes), signature.complete(feeds))


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
        raise unread_bytes(len(binary), offset)
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
    check_finite_input(tensor.name, array)
    return array
