"""The ASGI application: the KServe V2 protocol for one model, under uvicorn or Ray Serve."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from effexport.serving.protocol.errors import (
    CROWDED,
    FAILED,
    NOT_FOUND,
    UNAUTHORIZED,
    ClientGoneError,
    Refusal,
    RequestError,
)
from effexport.serving.server.inference import Inference
from effexport.serving.server.served_model import ServedModel
from effexport.version import __version__

logger = logging.getLogger("effexport.serving")
EXTENSIONS = ("binary_tensor_data", "model_repository")
# Health probes need no token.
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
# Not an HTTP standard, but customary. Only metrics show it, because the client has gone.
CLIENT_GONE_STATUS = 499


class Service:
    """Endpoints of one model.

    draining: the server is stopping, so it is not ready.
    is_crowded: whether too many connections are open; then only health probes are answered.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.draining = False
        self.is_crowded: Callable[[], bool] = lambda: False
        self.inference = Inference(model)

    @property
    def is_ready(self) -> bool:
        return self.model.is_ready and not self.draining

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        return json_response({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def server_metadata(self, request: Request) -> Response:
        return json_response({"name": "effexport", "version": __version__, "extensions": EXTENSIONS})

    async def model_metadata(self, request: Request) -> Response:
        self.check_model(request)
        return json_response(self.model.metadata())

    async def model_ready(self, request: Request) -> Response:
        self.check_model(request)
        return json_response({"name": self.model.name, "ready": self.is_ready}, 200 if self.is_ready else 503)

    async def repository_index(self, request: Request) -> Response:
        state = "READY" if self.is_ready else "UNAVAILABLE"
        reason = "" if self.is_ready else "the server is stopping"
        entry = {"name": self.model.name, "version": self.model.version, "state": state, "reason": reason}
        return json_response([entry])

    async def infer(self, request: Request) -> Response:
        started = time.perf_counter()
        metrics, status = self.model.metrics, 500
        try:
            self.check_model(request)
            response = await self.inference.answer(request)
            status = response.status_code
            return response
        except RequestError as error:
            status = error.kind.status
            raise
        except ClientGoneError:
            status = CLIENT_GONE_STATUS
            return Response(status_code=CLIENT_GONE_STATUS)
        finally:
            metrics.answered(status, time.perf_counter() - started)

    async def metrics(self, request: Request) -> Response:
        text, content_type = self.model.metrics.exposition()
        return Response(text, headers={"content-type": content_type})

    def check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version", self.model.version)
        if name != self.model.name:
            raise RequestError(f"no model {name[:128]!r}; this server has {self.model.name!r}", NOT_FOUND)
        if version != self.model.version:
            raise RequestError(f"no version {version[:32]!r} of {name}; expected {self.model.version!r}", NOT_FOUND)

    def check_connections(self, request: Request) -> None:
        if self.is_crowded() and request.url.path not in OPEN_PATHS:
            raise RequestError("too many connections are open; try again later", CROWDED)

    def check_token(self, request: Request) -> None:
        token = self.model.settings.token
        if token is None or request.url.path in OPEN_PATHS:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        # compared in constant time, so that a token cannot be guessed letter by letter
        if not hmac.compare_digest(given, f"Bearer {token}".encode("ascii")):
            raise RequestError("expected the header Authorization: Bearer, with the token of this server", UNAUTHORIZED)


def create_app(model: ServedModel) -> Starlette:
    """The application; it closes the model when its lifespan ends."""
    service = Service(model)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(model.close)

    def guarded(endpoint: Any) -> Any:
        async def call(request: Request) -> Response:
            service.check_connections(request)
            service.check_token(request)
            response: Response = await endpoint(request)
            return response

        return call

    paths: list[tuple[str, Any, str]] = [
        ("/v2/health/live", service.live, "GET"),
        ("/v2/health/ready", service.ready, "GET"),
        ("/v2", service.server_metadata, "GET"),
        ("/v2/repository/index", service.repository_index, "POST"),
        ("/metrics", service.metrics, "GET"),
    ]
    for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        paths += [
            (prefix, service.model_metadata, "GET"),
            (f"{prefix}/ready", service.model_ready, "GET"),
            (f"{prefix}/infer", service.infer, "POST"),
        ]

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        model.metrics.rejected(error.kind.reason)
        return refusal(str(error), error.kind, service)

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return json_response({"error": f"{request.method} {request.url.path[:200]}: {error.detail}"}, error.status_code)

    async def failed(request: Request, error: Exception) -> Response:
        return refusal("the server failed unexpectedly; its log says why", FAILED, service)

    app = Starlette(
        routes=[Route(path, guarded(endpoint), methods=[method]) for path, endpoint, method in paths],
        exception_handlers={RequestError: refused, HTTPException: not_served, Exception: failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def refusal(message: str, kind: Refusal, service: Service) -> Response:
    headers = {}
    if kind.status == 503:
        headers["retry-after"] = str(service.model.batcher.retry_after_s)
    elif kind is UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if kind is CROWDED or kind.status in (408, 413):
        # frees a connection, or avoids waiting for the rest of a body
        headers["connection"] = "close"
    return json_response({"error": message}, kind.status, headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
