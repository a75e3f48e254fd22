"""The endpoints of the V2 model repository extension: list, load and unload models."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from effexport.models.validation import shown
from effexport.serving.protocol.errors import STOPPING, RequestError
from effexport.serving.protocol.request_fields import flag, parameters_of, parsed_object
from effexport.serving.server.service import Endpoint, Service, json_response

# A parameter of Triton that has no effect here, because no model depends on another.
UNLOAD_DEPENDENTS = "unload_dependents"


def endpoints(service: Service) -> list[Endpoint]:
    repository = RepositoryApi(service)
    path = "/v2/repository/models/{name}"
    return [
        ("POST", "/v2/repository/index", repository.index),
        ("POST", f"{path}/load", repository.load),
        ("POST", f"{path}/unload", repository.unload),
    ]


class RepositoryApi:
    """Handlers of the model repository extension."""

    def __init__(self, service: Service) -> None:
        self._service = service

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
