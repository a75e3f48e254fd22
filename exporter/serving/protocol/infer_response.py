"""The body of an answer: JSON, which may be followed by the binary data of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES
from effexport.serving.protocol.errors import FAILED, RequestError

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.serving.protocol.infer_request import InferRequest


@dataclass(frozen=True)
class Answer:
    """The body of an answer. header_length: size of its JSON if binary data follows, else None."""

    body: bytes
    header_length: int | None


def answer_from_outputs(request: InferRequest, outputs: Mapping[str, Array], name: str, version: str) -> Answer:
    """Raises RequestError for NaN and infinity that would be sent as JSON."""
    import numpy as np
    import orjson

    described: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    for output, is_binary in request.outputs.items():
        array = outputs[output]
        datatype = DTYPES[array.dtype.name].protocol
        entry: dict[str, Any] = {"name": output, "datatype": datatype, "shape": list(array.shape)}
        if is_binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            # views, so that the only copy is into the body; view as uint8, because memoryview lacks some types
            binary.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        else:
            check_finite(output, array)
            entry["data"] = array.reshape(-1)
        described.append(entry)
    fields: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": described}
    if request.id is not None:
        fields["id"] = request.id
    text = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(b"".join([text, *binary]), len(text) if binary else None)


def check_finite(name: str, array: Array) -> None:
    import numpy as np

    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(
            f"output {name!r} contains NaN or infinity, which JSON cannot represent; ask for binary data", FAILED
        )
