"""The endpoints of a server: the KServe V2 protocol and its extensions (infer, generate, metadata, health, metrics, and
the model repository), and OpenAI's API as far as a server of encoders has it (embeddings, and the list of models).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from effexport.base.dtypes import Array
from effexport.base.errors import UserError
from effexport.base.version import __version__
from effexport.models.validation import shown
from effexport.serving.engine.errors import UNAUTHORIZED, Refusal, RequestError, stopping
from effexport.serving.engine.metrics import exposition
from effexport.serving.engine.queue import Waiting, aside
from effexport.serving.engine.settings import MAX_TEXTS
from effexport.serving.engine.signature import ANSWER, TEXT_INPUT, generation_request, text_of
from effexport.serving.http.bodies import (
    InferRequest,
    answer_from_outputs,
    flag,
    id_of,
    infer_request,
    json_length,
    parameters_of,
    parsed_object,
)
from effexport.serving.http.service import ENCODINGS, Endpoint, Service, json_response, watched
from effexport.tasks.sampling import Sampling
from effexport.tasks.task import DEFAULT_OPTIONS, TEXT_OPTIONS, options_from_parameters

if TYPE_CHECKING:
    from effexport.serving.http.models import ServedModel


EXTENSIONS = ("binary_tensor_data", "model_repository")


async def live(service: Service, request: Request) -> Response:
    return json_response({"live": True})


async def ready(service: Service, request: Request) -> Response:
    is_ready = service.models.is_ready and not service.draining
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def server_metadata(service: Service, request: Request) -> Response:
    return json_response({"name": "effexport", "version": __version__, "extensions": EXTENSIONS})


async def model_metadata(service: Service, request: Request) -> Response:
    with service.using(request) as model:
        return json_response(model.metadata())


async def model_ready(service: Service, request: Request) -> Response:
    with service.using(request) as model:
        is_ready = model.is_ready and not service.draining
        return json_response({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)


async def metrics(service: Service, request: Request) -> Response:
    text, content_type = exposition([service.metrics, *(model.metrics for model in service.models)])
    return Response(text, headers={"content-type": content_type})


async def index(service: Service, request: Request) -> Response:
    only_ready = flag(await fields_of(service, request), "ready", False, "the request")
    entries = await service.models.index()
    if service.draining:
        entries = [{**entry, "state": "UNAVAILABLE", "reason": "the server is stopping"} for entry in entries]
    return json_response([entry for entry in entries if entry["state"] == "READY" or not only_ready])


async def load(service: Service, request: Request) -> Response:
    await check_parameters(service, request, ())
    await service.models.load(request.path_params["name"])
    return Response()


async def unload(service: Service, request: Request) -> Response:
    # a parameter of Triton that has no effect here, because no model depends on another
    await check_parameters(service, request, ("unload_dependents",))
    await service.models.unload(request.path_params["name"])
    return Response()


async def check_parameters(service: Service, request: Request, accepted: tuple[str, ...]) -> None:
    """Raises RequestError for a parameter that this server would have to ignore."""
    if service.draining:
        raise stopping()
    for name in parameters_of(await fields_of(service, request), "the request"):
        if name not in accepted:
            raise RequestError(
                f"the request has the parameter {shown(name)}, which this server does not support; leave it out"
            )


async def fields_of(service: Service, request: Request) -> dict[str, Any]:
    """The JSON object of the body; empty without a body, as curl sends it."""
    async with service.body_of(request) as body:
        read = partial(parsed_object, body, "a JSON object, or nothing")
        return await service.parsed(len(body), read) if body else {}


async def infer(service: Service, request: Request) -> Response:
    """Answer an infer request. Raises RequestError if it is refused, ClientGoneError if the client has gone."""
    with service.using(request) as model:
        # before its body is read, so that an overloaded server refuses at once
        model.batcher.refuse_if_full()
        async with service.body_of(request) as body:
            length = json_length(body, request.headers.get("Inference-Header-Content-Length"))
            read = partial(infer_request, body, length, model.signature, lambda: model.texts.outputs)
            wanted = await service.parsed(length, read)
            with watched(request.receive):
                outputs = await outputs_from_wanted(wanted, model, service)
        size, headers = sum(array.nbytes for array in outputs.values()), {}
        write = partial(answer_from_outputs, wanted, outputs, model.name, model.version)
        body, header_length = await aside(size, write)
        if header_length is not None:
            headers["Inference-Header-Content-Length"] = str(header_length)
        # If a client lists several encodings (the default of most HTTP libraries), its answer is not compressed,
        # because compression takes longer than a run.
        encoding = request.headers.get("accept-encoding", "").strip().lower()
        if encoding in ENCODINGS:
            headers |= {"Content-Encoding": encoding, "Vary": "Accept-Encoding"}
            # fast rather than well: answers hardly get smaller
            body = await aside(len(body), partial(zlib.compress, body, 1, ENCODINGS[encoding]))
        kind = "application/json" if header_length is None else "application/octet-stream"
        return Response(body, headers=headers, media_type=kind)


async def outputs_from_wanted(wanted: InferRequest, model: ServedModel, service: Service) -> Mapping[str, Array]:
    """Run a request. Raises as `infer`."""
    longest_s = model.settings.timeout_s
    timeout_s = min(longest_s, wanted.timeout_s or longest_s)
    if not wanted.texts:
        return await model.batcher.outputs(wanted.feeds, timeout_s)
    waiting = Waiting(timeout_s, service.text_memory)
    given = {name: wanted.parameters[name] for name in TEXT_OPTIONS if wanted.parameters.get(name) is not None}
    return await model.texts.outputs_of(wanted.texts, wanted.outputs, options_from_parameters(given), waiting)


def generate_request(body: bytes, *, streaming: bool) -> tuple[str, Sampling, str | None]:
    """A text to continue, how, and the id to be returned. Parameters may be in `parameters` or beside the text.

    Raises UserError.
    """
    beside = parsed_object(body, f"a JSON object with {TEXT_INPUT}")
    identifier, text, inside = id_of(beside), beside.pop(TEXT_INPUT, None), beside.pop("parameters", None)
    beside.pop("id", None)
    if inside is not None and not isinstance(inside, dict):
        raise RequestError(f"parameters are {shown(inside)}; expected an object")
    prompt, sampling, stream = generation_request(text, (*beside.items(), *(inside or {}).items()))
    if stream not in (streaming, None):
        other = "generate" if streaming else "generate_stream"
        raise RequestError(f"stream is {shown(stream)}; send the request to …/{other}, or leave stream out")
    return prompt, sampling, identifier


# Proxies that buffer would hold back the events; this header turns that off in the most common one.
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def generate(service: Service, request: Request) -> Response:
    """Answer with a whole text."""
    with ExitStack() as stack:
        answers = await begun_text(service, request, stack, in_pieces=False)
        with watched(request.receive):
            return json_response(await anext(answers))


async def generate_stream(service: Service, request: Request) -> Response:
    """Answer with a text as server-sent events."""
    with ExitStack() as stack:
        answers = await begun_text(service, request, stack, in_pieces=True)
        # what fails before the first text is answered with a status
        with watched(request.receive):
            first = await anext(answers)
        return EventStream(first, answers, stack.pop_all())


async def begun_text(
    service: Service, request: Request, stack: ExitStack, *, in_pieces: bool
) -> AsyncIterator[dict[str, Any]]:
    """Begin the text that a request asks for. Returns its answers; the model stays in use until the stack is closed."""
    model = stack.enter_context(service.using(request))
    # before the body is read, so that an overloaded server refuses at once
    model.generations.refuse_if_full()
    async with service.body_of(request) as body:
        read = partial(generate_request, body, streaming=in_pieces)
        text, sampling, identifier = await service.parsed(len(body), read)
    stream = await model.generations.submit(text, sampling)
    stack.callback(stream.close)
    fields = {"model_name": model.name, "model_version": model.version}
    if identifier is not None:
        fields["id"] = identifier
    return ({**fields, **answer} async for answer in stream.answers(in_pieces=in_pieces))


class EventStream(StreamingResponse):
    """The events of a text. The text ends with the response, however that ends, even before it begins."""

    media_type = "text/event-stream"

    def __init__(self, first: Mapping[str, Any], others: AsyncIterator[dict[str, Any]], until_end: ExitStack) -> None:
        super().__init__(events_of(first, others), headers=EVENT_HEADERS)
        self._until_end = until_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._until_end:
            await super().__call__(scope, receive, send)


async def events_of(first: Mapping[str, Any], others: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Server-sent events with all answers to a text, and an error that ends it early."""
    yield event(first)
    try:
        async for answer in others:
            yield event(answer)
    except RequestError as error:
        yield event({"error": str(error)})


def event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


EMBEDDING_FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
EMBEDDING_FORMATS = ("float", "base64")
# Larger numbers are not even int64; which ones the model knows is checked with its name at hand.
LARGEST_TOKEN = 2**63


class FieldError(RequestError):
    """A refused request whose field `param` is at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class EmbeddingRequest:
    """inputs: texts, or tokens. dimensions: how many the client expects, or None."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    is_base64: bool
    dimensions: int | None


def embedding_request(body: bytes) -> EmbeddingRequest:
    """Parse and check a request. Raises RequestError."""
    fields = parsed_object(body, "a JSON object with model and input")
    for name in fields:
        if name not in EMBEDDING_FIELDS:
            raise FieldError(name[:80], f"unknown field {shown(name)}; expected: {', '.join(EMBEDDING_FIELDS)}")
    model, form, dimensions = fields.get("model"), fields.get("encoding_format"), fields.get("dimensions")
    if not isinstance(model, str):
        raise FieldError("model", f"model is {shown(model)}; expected the name of a model: GET /v1/models lists them")
    if form is not None and form not in EMBEDDING_FORMATS:
        raise FieldError(
            "encoding_format", f"encoding_format is {shown(form)}; expected {' or '.join(EMBEDDING_FORMATS)}"
        )
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise FieldError("dimensions", f"dimensions is {shown(dimensions)}; expected a positive integer")
    return EmbeddingRequest(model, checked_inputs(fields.get("input")), form == "base64", dimensions)


def checked_inputs(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, tokens, or lists of tokens, always as a tuple of inputs. The first element decides which."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise FieldError(
            "input", f"input is {shown(given)}; expected a string, a list of strings, or a list of lists of tokens"
        )
    if len(given) > MAX_TEXTS and not isinstance(given[0], int):
        raise FieldError("input", f"input has {len(given)} texts; expected at most {MAX_TEXTS}: send several requests")
    if isinstance(given[0], str):
        try:
            return tuple(text_of(text, f"element {index} of input") for index, text in enumerate(given))
        except UserError as error:
            raise FieldError("input", str(error)) from error
    if not isinstance(given[0], list):
        return (checked_tokens(given, "input"),)
    return tuple(checked_tokens(tokens, f"element {index} of input") for index, tokens in enumerate(given))


def checked_tokens(given: Any, what: str) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise FieldError("input", f"{what} is {shown(given)}; expected a list of tokens")
    for index, token in enumerate(given):
        if type(token) is not int or not 0 <= token < LARGEST_TOKEN:
            raise FieldError("input", f"{what} has {shown(token)} at {index}; expected tokens of the vocabulary")
    return tuple(given)


def embedding_answer(request: EmbeddingRequest, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON of an answer. answers: of the task, {embedding, tokens} for each input."""

    def to_form(vector: Sequence[float]) -> Sequence[float] | str:
        # as float32, little-endian
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if request.is_base64 else vector

    tokens = sum(answer["tokens"] for answer in answers)
    return {
        "object": "list",
        "model": request.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": to_form(answer["embedding"])}
            for index, answer in enumerate(answers)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def openai_error(message: str, kind: Refusal, param: str | None = None) -> dict[str, Any]:
    """The JSON of a refusal, in the form that OpenAI's clients read."""
    name = "invalid_request_error" if kind.status < 500 else "server_error"
    code = "invalid_api_key" if kind is UNAUTHORIZED else kind.reason
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


async def list_models(service: Service, request: Request) -> Response:
    return json_response({"object": "list", "data": [model_card(model) for model in service.models]})


async def one_model(service: Service, request: Request) -> Response:
    with service.using(request) as model:
        return json_response(model_card(model))


async def embeddings(service: Service, request: Request) -> Response:
    async with service.body_of(request) as body:
        wanted = await service.parsed(len(body), partial(embedding_request, body))
        with service.using(request, wanted.model) as model:
            check_embeds(model, wanted)
            waiting = Waiting(service.settings.timeout_s, service.text_memory)
            inputs = [(one, None) for one in wanted.inputs]
            with watched(request.receive):
                found = await model.texts.answers(inputs, (ANSWER,), DEFAULT_OPTIONS, waiting)
    return json_response(embedding_answer(wanted, [one[ANSWER] for one in found]))


def check_embeds(model: ServedModel, wanted: EmbeddingRequest) -> None:
    """Raises RequestError for a model without embeddings, or with others than the client expects."""
    if not model.texts.is_embedding:
        raise FieldError(
            "model", f"model {model.name!r} answers {model.texts.name}, not embeddings; build one with --pool"
        )
    width = model.signature.outputs[0].dims[-1]
    if wanted.dimensions not in (None, width):
        raise FieldError(
            "dimensions",
            f"dimensions is {wanted.dimensions}; {model.name!r} has {width}: leave it out, or build the artifact with "
            "--truncate-dim",
        )


def model_card(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.loaded_at, "owned_by": "effexport"}


# Errors below this path have the form of OpenAI's API.
OPENAI = "/v1"
OF_MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
STORED = "/v2/repository/models/{name}"
ENDPOINTS = (
    # paths are compared in this order, and most requests are these
    *(Endpoint("POST", f"{prefix}/infer", infer, counts=True) for prefix in OF_MODEL),
    *(Endpoint("GET", prefix, model_metadata) for prefix in OF_MODEL),
    *(Endpoint("GET", f"{prefix}/ready", model_ready) for prefix in OF_MODEL),
    Endpoint("GET", "/v2/health/live", live),
    Endpoint("GET", "/v2/health/ready", ready),
    Endpoint("GET", "/v2", server_metadata),
    Endpoint("GET", "/metrics", metrics),
    Endpoint("POST", "/v2/repository/index", index),
    Endpoint("POST", f"{STORED}/load", load),
    Endpoint("POST", f"{STORED}/unload", unload),
    *(Endpoint("POST", f"{prefix}/generate", generate, counts=True) for prefix in OF_MODEL),
    *(Endpoint("POST", f"{prefix}/generate_stream", generate_stream, counts=True) for prefix in OF_MODEL),
    Endpoint("POST", f"{OPENAI}/embeddings", embeddings, counts=True),
    Endpoint("GET", f"{OPENAI}/models", list_models),
    Endpoint("GET", f"{OPENAI}/models/{{name}}", one_model),
)
