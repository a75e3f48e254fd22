"""The application with all endpoints, and uvicorn with a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from effexport.errors import UserError
from effexport.serving.engine.errors import BAD_HEAD, CROWDED, FAILED, UNAUTHORIZED, Refusal, RequestError
from effexport.serving.http import generate, openai, v2
from effexport.serving.http.connection import Protocol, disconnect_slow_readers
from effexport.serving.http.openai import openai_error
from effexport.serving.http.service import Endpoint, Service, json_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from effexport.serving.http.models import ModelRepository


# Every group of endpoints is a module of its own.
GROUPS: tuple[Callable[[Service], list[Endpoint]], ...] = (v2.endpoints, generate.endpoints, openai.endpoints)


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
    """A check that every request passes first, also those for which there is no endpoint."""

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
    is_openai = request.scope["path"].startswith(f"{openai.PREFIX}/")
    return json_response(openai_error(message, kind, param) if is_openai else {"error": message}, kind.status, headers)


# When the server stops, it waits this long for requests that are on their way over open connections.
DRAIN_S = 0.3
BACKLOG = 1024
# Further ones get a 503, because every connection may hold an answer that its client does not read.
MAX_CONNECTIONS = 2048
# For these connections, those that are being refused, and the files of the process itself.
MAX_OPEN_FILES = 2 * MAX_CONNECTIONS


class Server(uvicorn.Server):
    """A uvicorn server that calls on_ready when it accepts requests, and answers them all before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        # uvicorn's own limit_concurrency sends no Retry-After, is not in the metrics, and refuses health probes
        service.is_crowded = lambda: len(self.server_state.connections) > MAX_CONNECTIONS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            connections = cast("set[Protocol]", self.server_state.connections)
            limit = self._service.settings.max_bytes_in_memory
            disconnect_slow_readers(connections, limit, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections; answer the requests on open ones, and close each after its answer."""
        self._service.draining = True
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False
        await asyncio.sleep(DRAIN_S)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again at the end: a requested stop is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0: a free port.

    Raises UserError for an address that this machine does not have, or a port that is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host is {host!r}, which is not an address: {error}; expected a name or an address"
        ) from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # fails if another server listens on the port; this one listens when its model is ready
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port, or stop what uses it"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket, with brackets around an IPv6 address."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit() -> None:
    """Raise the limit on open files, which is often 1024; every connection is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_server(app: Any, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. The application's lifespan closes the models."""
    raise_file_limit()
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        access_log=False,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        # after that, the only clients left are those that do not read their answers
        timeout_graceful_shutdown=math.ceil(30 + 2 * app.state.service.settings.timeout_s),
    )
    Server(config, app.state.service, on_ready).run(sockets=[bound])
