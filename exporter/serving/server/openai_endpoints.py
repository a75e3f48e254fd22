"""The endpoints of OpenAI's API that a server of encoders has: embeddings, and the list of models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from effexport.serving.protocol.embedding_request import (
    EmbeddingRequest,
    FieldError,
    embedding_answer,
    embedding_request,
)
from effexport.serving.server.queued import watched
from effexport.serving.server.service import Endpoint, Service, json_response
from effexport.serving.server.waiting import Waiting

if TYPE_CHECKING:
    from effexport.serving.server.served_model import ServedModel

# Errors below this path have the form of OpenAI's API.
PREFIX = "/v1"


def endpoints(service: Service) -> list[Endpoint]:
    api = OpenAiApi(service)
    return [
        ("POST", f"{PREFIX}/embeddings", api.embeddings),
        ("GET", f"{PREFIX}/models", api.models),
        ("GET", f"{PREFIX}/models/{{name}}", api.model),
    ]


class OpenAiApi:
    """Handlers of OpenAI's API."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(model) for model in self._service.models]})

    async def model(self, request: Request) -> Response:
        return json_response(model_card(self._service.model(request)))

    async def embeddings(self, request: Request) -> Response:
        return await self._service.counted(request, self._embeddings)

    async def _embeddings(self, request: Request) -> Response:
        async with self._service.body_of(request) as body:
            wanted = await self._service.parsed(len(body), partial(embedding_request, body))
            with self._service.using(request, wanted.model) as model, watched(request.receive) as gone:
                check_embeds(model, wanted)
                waiting = Waiting(self._service.settings.timeout_s, gone, self._service.text_memory)
                answers = await model.texts.embeddings_of(model, wanted.inputs, waiting)
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
