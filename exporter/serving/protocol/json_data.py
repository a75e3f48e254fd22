"""Tensors as JSON: numbers in row-major order, flat or nested, checked one type at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES
from effexport.models.validation import shown
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.signature import BINARY_ONLY

if TYPE_CHECKING:
    from effexport.dtypes import Array, TensorInfo

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
    import numpy as np

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
    import numpy as np

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
