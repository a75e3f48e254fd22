"""One infer request from its body to its answer: read, checked, queued, run, written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from effexport.serving.protocol.body import aside, compress, wanted_encoding
from effexport.serving.protocol.infer_request import InferRequest, infer_request
from effexport.serving.protocol.infer_response import Answer, answer_from_outputs
from effexport.serving.protocol.request_fields import fields_from_body, json_length
from effexport.serving.protocol.text_request import TextRequest, has_texts, text_request
from effexport.serving.server.queued import Gone, outputs_of, watched
from effexport.serving.server.waiting import Waiting

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.serving.server.served_model import ServedModel
    from effexport.serving.server.service import Service

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
        return await outputs_of(model, wanted.feeds, timeout_s, gone)
    return await model.texts.outputs_of(model, wanted, Waiting(timeout_s, gone, service.text_memory))


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
