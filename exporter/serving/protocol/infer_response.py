"""The body of an answer: JSON, which may be followed by the binary data of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.json_data import PIECE

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.serving.protocol.request_fields import Wanted

# Where numbers are filled in. In JSON, this byte stands nowhere else.
GAP = b"\0"


@dataclass(frozen=True)
class Answer:
    """The body of an answer. header_length: size of its JSON if binary data follows, else None."""

    body: bytes
    header_length: int | None


def answer_from_outputs(
    wanted: Wanted, outputs: Mapping[str, Array | Sequence[bytes]], name: str, version: str
) -> Answer:
    """outputs: arrays, or strings in UTF-8. Raises RequestError for NaN and infinity that would be sent as JSON."""
    import orjson

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
    import orjson

    parts: list[bytes | memoryview] = []
    for start in range(0, len(numbers), PIECE):
        text = orjson.dumps(numbers[start : start + PIECE], option=orjson.OPT_SERIALIZE_NUMPY)
        parts += [memoryview(text)[1:-1], b","]
    return [b"[", *parts[:-1], b"]"]


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array as a view, so that the only copy is into the body."""
    import numpy as np

    # as uint8, because memoryview lacks some types
    view: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return view


def sized_strings(strings: Sequence[bytes]) -> bytes:
    """BYTES as binary data: each string after its size in four bytes, little-endian."""
    return b"".join(part for text in strings for part in (len(text).to_bytes(4, "little"), text))


def check_finite(name: str, array: Array) -> None:
    import numpy as np

    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(
            f"output {name!r} contains NaN or infinity, which JSON cannot represent; ask for binary data, and see "
            "whether the inputs are too large for the model"
        )
