"""Triton's generate extension: requests, and their answers as whole texts or server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from effexport.errors import UserError
from effexport.generation.sampling import ALIASES, Sampling
from effexport.generation.text_generator import Piece
from effexport.models.validation import did_you_mean, shown
from effexport.serving.engine.errors import ClientGoneError, RequestError
from effexport.serving.engine.signature import STREAM, TEXT_INPUT
from effexport.serving.http.body import watched
from effexport.serving.http.request import checked_texts, id_of, parsed_object
from effexport.serving.http.service import Endpoint, Service, json_response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from effexport.serving.engine.generation import Stream
    from effexport.serving.http.models import ServedModel


@dataclass(frozen=True)
class GenerateRequest:
    """A text to continue. id: to be returned."""

    id: str | None
    text: str
    sampling: Sampling


def generate_request(body: bytes, *, streaming: bool) -> GenerateRequest:
    """Parse and check a request. Parameters may be in `parameters` or beside the text. Raises RequestError."""
    given = parsed_object(body, f"a JSON object with {TEXT_INPUT}")
    identifier, text, parameters = id_of(given), given.pop(TEXT_INPUT, None), given.pop("parameters", None)
    given.pop("id", None)
    if not isinstance(text, str):
        given_text = "missing" if text is None else shown(text)
        raise RequestError(f"{TEXT_INPUT} is {given_text}; expected the text to continue")
    checked_texts([text], TEXT_INPUT)
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"parameters are {shown(parameters)}; expected an object")
    return GenerateRequest(identifier, text, sampling_from(given, parameters or {}, streaming=streaming))


def sampling_from(beside: Mapping[str, Any], inside: Mapping[str, Any], *, streaming: bool) -> Sampling:
    """The parameters of a request; None counts as not given. Raises RequestError."""
    known = [field.name for field in fields(Sampling)]
    found: dict[str, Any] = {}
    for name, value in (*beside.items(), *inside.items()):
        if name == STREAM:
            if value not in (streaming, None):
                other = "generate" if streaming else "generate_stream"
                raise RequestError(f"stream is {shown(value)}; send the request to …/{other}, or leave stream out")
            continue
        own = ALIASES.get(name, name)
        if own not in known:
            names = (*known, *ALIASES)
            raise RequestError(f"unknown parameter {shown(name)}{did_you_mean(name, names)} Known: {', '.join(names)}")
        if own in found:
            raise RequestError(f"the parameter {own} is given twice")
        found[own] = value
    try:
        return Sampling(**{name: value for name, value in found.items() if value is not None})
    except UserError as error:
        raise RequestError(str(error)) from error


def answer_fields(
    request: GenerateRequest, name: str, version: str, pieces: Sequence[Piece], prompt_tokens: int, seed: int
) -> dict[str, Any]:
    """The answer with pieces of the text: all of them, or those of one event. The last says how the text ended."""
    answer: dict[str, Any] = {
        "model_name": name,
        "model_version": version,
        "text_output": "".join(piece.text for piece in pieces),
        "tokens": [piece.token for piece in pieces if piece.finish_reason != "eos"],
    }
    if request.id is not None:
        answer["id"] = request.id
    if (reason := pieces[-1].finish_reason) is not None:
        answer |= {"finish_reason": reason, "prompt_tokens": prompt_tokens, "seed": seed}
    return answer


def event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(fields) + b"\n\n"


# Proxies that buffer would hold back the events; this header turns that off in the most common one.
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def endpoints(service: Service) -> list[Endpoint]:
    handlers = Generate(service)
    return [
        ("POST", f"/v2/models/{{name}}{version}/{verb}", handler)
        for version in ("", "/versions/{version}")
        for verb, handler in (("generate", handlers.generate), ("generate_stream", handlers.generate_stream))
    ]


class Generate:
    """Handlers of the generate extension."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, request: Request) -> Response:
        return await self._service.counted(request, self._whole)

    async def generate_stream(self, request: Request) -> Response:
        return await self._service.counted(request, self._events)

    async def _whole(self, request: Request) -> Response:
        with ExitStack() as stack:
            text = await self._begin(request, stack, streaming=False)
            pieces = await text.stream.pieces()
            while pieces[-1].finish_reason is None:
                pieces += await text.stream.pieces()
            return json_response(text.answer(pieces))

    async def _events(self, request: Request) -> Response:
        with ExitStack() as stack:
            text = await self._begin(request, stack, streaming=True)
            # what fails before the first token is answered with a status
            first = await text.stream.pieces()
            return EventStream(text, first, stack.pop_all())

    async def _begin(self, request: Request, stack: ExitStack, *, streaming: bool) -> Text:
        """Begin the text that a request asks for. The model stays in use until the stack is closed."""
        model = stack.enter_context(self._service.using(request))
        # before the body is read, so that an overloaded server refuses at once
        model.generations.refuse_if_full()
        async with self._service.body_of(request) as body:
            wanted = await self._service.parsed(len(body), partial(generate_request, body, streaming=streaming))
        stream = await model.generations.submit(wanted.text, wanted.sampling)
        stack.callback(stream.close)
        gone = stack.enter_context(watched(request.receive))
        gone.add_done_callback(lambda _: stream.put(ClientGoneError()))
        return Text(model, wanted, stream)


class Text:
    """A text that a client waits for."""

    def __init__(self, model: ServedModel, request: GenerateRequest, stream: Stream) -> None:
        self._model = model
        self._request = request
        self.stream = stream

    def answer(self, pieces: list[Piece]) -> dict[str, Any]:
        session, model = self.stream.session, self._model
        return answer_fields(self._request, model.name, model.version, pieces, len(session.prompt), session.seed)


class EventStream(Response):
    """The events of a text. The text ends with the response, however that ends."""

    media_type = "text/event-stream"

    def __init__(self, text: Text, first: list[Piece], until_end: ExitStack) -> None:
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._text = text
        self._first = first
        self._until_end = until_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._until_end:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send_events(send)
            except ClientGoneError:
                return
            except RequestError as error:
                await send_part(send, event({"error": str(error)}))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        pieces = self._first
        while True:
            # the text of a token that ends inside a character comes with a later token
            if pieces[-1].finish_reason is not None or any(piece.text for piece in pieces):
                await send_part(send, event(self._text.answer(pieces)))
                if pieces[-1].finish_reason is not None:
                    return
                pieces = []
            pieces = [*pieces, *await self._text.stream.pieces()]


async def send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
