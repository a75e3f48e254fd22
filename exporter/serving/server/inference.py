"""One infer request from its body to its answer: read, checked, queued, run, written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from effexport.serving.protocol.body import THREAD_BYTES, compress, wanted_encoding
from effexport.serving.protocol.infer_request import infer_request
from effexport.serving.protocol.infer_response import Answer, answer_from_outputs
from effexport.serving.protocol.request_fields import Fields, Wanted, fields_from_body
from effexport.serving.protocol.text_request import has_texts, text_request
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
        parsed = fields_from_body(body, request.headers.get(HEADER_LENGTH))
        with watched(request.receive) as gone:
            wanted, outputs = await answered(parsed, model, gone, service)
    answer = answer_from_outputs(wanted, outputs, model.name, model.version)
    return await encoded(answer, wanted_encoding(request.headers.get("accept-encoding")))


async def answered(
    parsed: Fields, model: ServedModel, gone: Gone, service: Service
) -> tuple[Wanted, Mapping[str, Array | Sequence[bytes]]]:
    """Run a request with tensors or with texts. Raises as `infer`."""
    longest_s = model.settings.timeout_s
    if not has_texts(parsed, model.signature):
        request = infer_request(parsed, model.signature)
        timeout_s = min(longest_s, request.timeout_s or longest_s)
        return request, await outputs_of(model, request.feeds, timeout_s, gone)
    text = text_request(parsed, model.texts.outputs)
    waiting = Waiting(min(longest_s, text.timeout_s or longest_s), gone, service.text_memory)
    return text, await model.texts.outputs_of(model, text, waiting)


async def encoded(answer: Answer, encoding: str | None) -> Response:
    """The response with the body of an answer, compressed if `encoding` is not None."""
    body, headers = answer.body, {}
    if answer.header_length is not None:
        headers["Inference-Header-Content-Length"] = str(answer.header_length)
    if encoding is not None:
        headers["Content-Encoding"] = encoding
        headers["Vary"] = "Accept-Encoding"
        packed = len(body) > THREAD_BYTES
        body = await asyncio.to_thread(compress, body, encoding) if packed else compress(body, encoding)
    kind = "application/octet-stream" if answer.header_length is not None else "application/json"
    return Response(body, headers=headers, media_type=kind)
