"""The endpoints of the KServe V2 protocol: infer, metadata, health, metrics, and the model repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from effexport.dtypes import DTYPES
from effexport.models.encoder.spec import EMBEDDING
from effexport.models.validation import shown
from effexport.serving.engine.errors import STOPPING, RequestError
from effexport.serving.engine.metrics import exposition
from effexport.serving.engine.queue import Gone, Waiting, aside
from effexport.serving.engine.signature import ANSWER
from effexport.serving.http.body import compress, wanted_encoding, watched
from effexport.serving.http.request import (
    PIECE,
    InferRequest,
    TextRequest,
    Wanted,
    fields_from_body,
    flag,
    has_texts,
    infer_request,
    json_length,
    parameters_of,
    parsed_object,
    text_request,
)
from effexport.serving.http.service import Endpoint, Service, json_response
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.serving.http.models import ServedModel


EXTENSIONS = ("binary_tensor_data", "model_repository")
# A parameter of Triton that has no effect here, because no model depends on another.
UNLOAD_DEPENDENTS = "unload_dependents"


def endpoints(service: Service) -> list[Endpoint]:
    v2 = V2(service)
    prefixes = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    stored = "/v2/repository/models/{name}"
    return [
        # paths are compared in this order, and most requests are these
        *(("POST", f"{prefix}/infer", v2.infer) for prefix in prefixes),
        *(("GET", prefix, v2.model_metadata) for prefix in prefixes),
        *(("GET", f"{prefix}/ready", v2.model_ready) for prefix in prefixes),
        ("GET", "/v2/health/live", v2.live),
        ("GET", "/v2/health/ready", v2.ready),
        ("GET", "/v2", v2.server_metadata),
        ("GET", "/metrics", v2.metrics),
        ("POST", "/v2/repository/index", v2.index),
        ("POST", f"{stored}/load", v2.load),
        ("POST", f"{stored}/unload", v2.unload),
    ]


class V2:
    """Handlers of the V2 protocol and of its model repository extension."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        is_ready = self._service.is_ready
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    async def server_metadata(self, request: Request) -> Response:
        return json_response({"name": "effexport", "version": __version__, "extensions": EXTENSIONS})

    async def model_metadata(self, request: Request) -> Response:
        return json_response(self._service.model(request).metadata())

    async def model_ready(self, request: Request) -> Response:
        model = self._service.model(request)
        is_ready = model.is_ready and not self._service.draining
        return json_response({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)

    async def infer(self, request: Request) -> Response:
        async def answer(request: Request) -> Response:
            with self._service.using(request) as model:
                return await infer(request, model, self._service)

        return await self._service.counted(request, answer)

    async def metrics(self, request: Request) -> Response:
        text, content_type = exposition([self._service.metrics, *(model.metrics for model in self._service.models)])
        return Response(text, headers={"content-type": content_type})

    async def index(self, request: Request) -> Response:
        only_ready = flag(await self._fields(request), "ready", False, "the request")
        entries = await self._service.models.index()
        if self._service.draining:
            entries = [{**entry, "state": "UNAVAILABLE", "reason": "the server is stopping"} for entry in entries]
        return json_response([entry for entry in entries if entry["state"] == "READY" or not only_ready])

    async def load(self, request: Request) -> Response:
        await self._check_parameters(request, ())
        await self._service.models.load(request.path_params["name"])
        return Response()

    async def unload(self, request: Request) -> Response:
        await self._check_parameters(request, (UNLOAD_DEPENDENTS,))
        await self._service.models.unload(request.path_params["name"])
        return Response()

    async def _check_parameters(self, request: Request, accepted: tuple[str, ...]) -> None:
        """Raises RequestError for a parameter that this server would have to ignore."""
        if self._service.draining:
            raise RequestError("the server is stopping; send the request to another one", STOPPING)
        for name in parameters_of(await self._fields(request), "the request"):
            if name not in accepted:
                raise RequestError(
                    f"the request has the parameter {shown(name)}, which this server does not support; leave it out"
                )

    async def _fields(self, request: Request) -> dict[str, Any]:
        """The JSON object of the body; empty without a body, as curl sends it."""
        async with self._service.body_of(request) as body:
            read = partial(parsed_object, body, "a JSON object, or nothing")
            return await self._service.parsed(len(body), read) if body else {}


HEADER_LENGTH = "inference-header-content-length"


async def infer(request: Request, model: ServedModel, service: Service) -> Response:
    """Answer an infer request. Raises RequestError if it is refused, ClientGoneError if the client has gone."""
    # before its body is read, so that an overloaded server refuses at once
    model.batcher.refuse_if_full()
    async with service.body_of(request) as body:
        header = request.headers.get(HEADER_LENGTH)
        wanted = await service.parsed(json_length(body, header), partial(wanted_from_body, body, header, model))
        with watched(request.receive) as gone:
            outputs = await outputs_from_wanted(wanted, model, gone, service)
    size = sum(array.nbytes for array in outputs.values() if not isinstance(array, Sequence))
    answer = await aside(size, partial(answer_from_outputs, wanted, outputs, model.name, model.version))
    return await encoded(answer, wanted_encoding(request.headers.get("accept-encoding")))


def wanted_from_body(body: bytes, header: str | None, model: ServedModel) -> InferRequest | TextRequest:
    """Read a request with tensors or with texts. header: see `fields_from_body`. Raises RequestError."""
    parsed = fields_from_body(body, header)
    if has_texts(parsed, model.signature):
        return text_request(parsed, model.texts.outputs)
    return infer_request(parsed, model.signature)


async def outputs_from_wanted(
    wanted: InferRequest | TextRequest, model: ServedModel, gone: Gone, service: Service
) -> Mapping[str, Array | Sequence[bytes]]:
    """Run a request. Raises as `infer`."""
    longest_s = model.settings.timeout_s
    timeout_s = min(longest_s, wanted.timeout_s or longest_s)
    if isinstance(wanted, InferRequest):
        return await model.batcher.outputs(wanted.feeds, timeout_s, gone)
    waiting = Waiting(timeout_s, gone, service.text_memory)
    answers = await model.texts.answers_of(wanted.texts, wanted.parameters, waiting)
    outputs: dict[str, Array | Sequence[bytes]] = {ANSWER: [orjson.dumps(answer) for answer in answers]}
    if model.texts.is_embedding:
        outputs[EMBEDDING] = np.array([answer["embedding"] for answer in answers], np.float32)
    return outputs


async def encoded(answer: Answer, encoding: str | None) -> Response:
    """The response with the body of an answer, compressed if `encoding` is not None."""
    body, headers = answer.body, {}
    if answer.header_length is not None:
        headers["Inference-Header-Content-Length"] = str(answer.header_length)
    if encoding is not None:
        headers["Content-Encoding"] = encoding
        headers["Vary"] = "Accept-Encoding"
        body = await aside(len(body), partial(compress, body, encoding))
    kind = "application/octet-stream" if answer.header_length is not None else "application/json"
    return Response(body, headers=headers, media_type=kind)


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
