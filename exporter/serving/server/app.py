"""The ASGI application: the endpoints of all models of a server, under uvicorn or Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from effexport.serving.protocol.embedding_request import openai_error
from effexport.serving.protocol.errors import CROWDED, FAILED, UNAUTHORIZED, Refusal, RequestError
from effexport.serving.server import generate_endpoints, openai_endpoints, repository_endpoints, v2_endpoints
from effexport.serving.server.service import Endpoint, Service, json_response

if TYPE_CHECKING:
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
        service.metrics_of(request).rejected(error.kind.reason)
        return refusal(str(error), error.kind, service, request, getattr(error, "param", None))

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return refusal(message, Refusal(error.status_code, "not_served"), service, request)

    async def failed(request: Request, error: Exception) -> Response:
        return refusal("the server failed unexpectedly; its log says why", FAILED, service, request)

    app = Starlette(
        routes=[
            Route(path, service.guarded(handler), methods=[method])
            for group in GROUPS
            for method, path, handler in group(service)
        ],
        exception_handlers={RequestError: refused, HTTPException: not_served, Exception: failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def refusal(message: str, kind: Refusal, service: Service, request: Request, param: str | None = None) -> Response:
    """param: the field at fault, for errors in the form of OpenAI's API."""
    headers = {}
    if kind.status == 503:
        headers["retry-after"] = str(service.retry_after_s(request))
    elif kind is UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if kind is CROWDED or kind.status in (408, 413):
        # frees a connection, or avoids waiting for the rest of a body
        headers["connection"] = "close"
    is_openai = request.url.path.startswith(f"{openai_endpoints.PREFIX}/")
    return json_response(openai_error(message, kind, param) if is_openai else {"error": message}, kind.status, headers)
