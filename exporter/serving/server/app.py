"""The ASGI application: the endpoints of all models of a server, under uvicorn or Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from effexport.serving.protocol.embedding_request import openai_error
from effexport.serving.protocol.errors import BAD_HEAD, CROWDED, FAILED, UNAUTHORIZED, Refusal, RequestError
from effexport.serving.server import generate_endpoints, openai_endpoints, repository_endpoints, v2_endpoints
from effexport.serving.server.service import Endpoint, Service, json_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from effexport.serving.server.model_repository import ModelRepository

# Every group of endpoints is a module of its own.
GROUPS: tuple[Callable[[Service], list[Endpoint]], ...] = (
    v2_endpoints.endpoints,
    generate_endpoints.endpoints,
    repository_endpoints.endpoints,
    openai_endpoints.endpoints,
)


def create_app(models: ModelRepository) -> Starlette:
    """The application; it closes the models when its lifespan ends."""
    service = Service(models)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return refusal_from_error(error, service, request)

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
        return refusal(message, Refusal(error.status_code, "not_served"), service, request)

    async def failed(request: Request, error: Exception) -> Response:
        return refusal("the server failed unexpectedly; its log says why", FAILED, service, request)

    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for group in GROUPS for method, path, handler in group(service)],
        middleware=[Middleware(Guard, service)],
        exception_handlers={RequestError: refused, HTTPException: not_served, Exception: failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


class Guard:
    """What every request passes first, also those for which there is no endpoint."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._service.check_request(request)
            except RequestError as error:
                answer = refusal_from_error(error, self._service, request)
        await answer(scope, receive, send)


def refusal_from_error(error: RequestError, service: Service, request: Request) -> Response:
    service.metrics_of(request).rejected(error.kind.reason)
    return refusal(str(error), error.kind, service, request, getattr(error, "param", None))


def refusal(message: str, kind: Refusal, service: Service, request: Request, param: str | None = None) -> Response:
    """param: the field at fault, for errors in the form of OpenAI's API."""
    headers = {}
    if kind.status == 503:
        headers["retry-after"] = str(service.retry_after_s(request))
    elif kind is UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if kind in (CROWDED, BAD_HEAD) or kind.status in (408, 413, 431):
        # frees a connection, avoids waiting for the rest of a body, or does not guess where the next request begins
        headers["connection"] = "close"
    is_openai = request.scope["path"].startswith(f"{openai_endpoints.PREFIX}/")
    return json_response(openai_error(message, kind, param) if is_openai else {"error": message}, kind.status, headers)
