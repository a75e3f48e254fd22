"""One infer request from its body to its answer: read, checked, queued, run, written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from effexport.serving.protocol.body import THREAD_BYTES, ByteBudget, Receive, compress, read_body, wanted_encoding
from effexport.serving.protocol.errors import ClientGoneError
from effexport.serving.protocol.infer_request import request_from_body
from effexport.serving.protocol.infer_response import Answer, answer_from_outputs
from effexport.serving.server.batcher import Job, waited_too_long

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.serving.server.served_model import ServedModel

HEADER_LENGTH = "inference-header-content-length"


async def infer(request: Request, model: ServedModel, budget: ByteBudget) -> Response:
    """Answer an infer request. Raises RequestError if it is refused, ClientGoneError if the client has gone."""
    settings = model.settings
    # before its body is read, so that an overloaded server refuses at once
    model.batcher.refuse_if_full()
    with budget.account() as take:
        body = await read_body(request.receive, request.headers, settings.max_request_bytes, settings.timeout_s, take)
        infer_request = request_from_body(body, request.headers.get(HEADER_LENGTH), model.signature)
        timeout_s = min(settings.timeout_s, infer_request.timeout_s or settings.timeout_s)
        outputs = await outputs_of(model, infer_request.feeds, infer_request.rows, timeout_s, request.receive)
    answer = answer_from_outputs(infer_request, outputs, model.name, model.version)
    return await encoded(answer, wanted_encoding(request.headers.get("accept-encoding")))


async def outputs_of(
    model: ServedModel, feeds: Mapping[str, Array], rows: int, timeout_s: float, receive: Receive
) -> Mapping[str, Array]:
    """Queue feeds and wait for their outputs. Raises as `first_of`."""
    job = model.batcher.submit(feeds, rows, timeout_s)
    gone = asyncio.ensure_future(client_gone(receive))
    try:
        return await first_of(job, gone, timeout_s)
    finally:
        gone.cancel()
        job.answer.cancel()


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


async def first_of(job: Job, gone: asyncio.Future[None], timeout_s: float) -> Mapping[str, Array]:
    """The outputs of the job. Raises ClientGoneError, or RequestError if the job does not start in time."""
    timeout: float | None = timeout_s
    while True:
        either: tuple[asyncio.Future[Any], ...] = (job.answer, gone)
        done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if job.answer in done:
            return job.answer.result()
        if gone in done:
            raise ClientGoneError
        if not job.started:
            raise waited_too_long()
        timeout = None  # the run has started and cannot be stopped


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
