"""OpenAI's API as far as a server of encoders has it: embeddings, and the list of models."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from effexport.models.validation import shown
from effexport.serving.engine.errors import UNAUTHORIZED, Refusal, RequestError
from effexport.serving.engine.queue import Waiting
from effexport.serving.engine.settings import MAX_TEXTS
from effexport.serving.http.request import checked_texts, parsed_object
from effexport.serving.http.service import Endpoint, Service, json_response, watched

if TYPE_CHECKING:
    from effexport.serving.http.models import ServedModel


FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
FORMATS = ("float", "base64")
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
        if name not in FIELDS:
            raise FieldError(name[:80], f"unknown field {shown(name)}; expected: {', '.join(FIELDS)}")
    model, form, dimensions = fields.get("model"), fields.get("encoding_format"), fields.get("dimensions")
    if not isinstance(model, str):
        raise FieldError("model", f"model is {shown(model)}; expected the name of a model: GET /v1/models lists them")
    if form is not None and form not in FORMATS:
        raise FieldError("encoding_format", f"encoding_format is {shown(form)}; expected {' or '.join(FORMATS)}")
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
            return checked_texts(given, "input")
        except RequestError as error:
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
    import numpy as np

    def to_form(vector: Sequence[float]) -> Sequence[float] | str:
        # as float32, little-endian
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if request.is_base64 else vector

    tokens = sum(answer["tokens"] for answer in answers)
    return {
        "object": "list",
        "model": request.model,
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": to_form(answer["embedding"]),
            }
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
        with service.using(request, wanted.model) as model, watched(request.receive) as gone:
            check_embeds(model, wanted)
            waiting = Waiting(service.settings.timeout_s, gone, service.text_memory)
            answers = await model.texts.embeddings_of(wanted.inputs, waiting)
    return json_response(embedding_answer(wanted, answers))


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
PREFIX = "/v1"
ENDPOINTS = (
    Endpoint("POST", f"{PREFIX}/embeddings", embeddings, counts=True),
    Endpoint("GET", f"{PREFIX}/models", list_models),
    Endpoint("GET", f"{PREFIX}/models/{{name}}", one_model),
)
