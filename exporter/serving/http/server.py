"""The application with all endpoints, and uvicorn with limits for clients that are slow, rude or malicious, and a
shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, cast

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from effexport.base.errors import EffexportError, UserError
from effexport.serving.engine.errors import BAD_HEAD, CROWDED, UNAUTHORIZED, Refusal, RequestError, refusal_of
from effexport.serving.http.endpoints import ENDPOINTS, OPENAI, openai_error
from effexport.serving.http.models import ModelRepository
from effexport.serving.http.service import MAX_HEAD_BYTES, Service, json_response


def create_app(models: ModelRepository) -> Starlette:
    """The application; it closes the models when its lifespan ends."""
    service = Service(models)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    app = Starlette(
        routes=[
            Route(endpoint.path, partial(service.answer, endpoint), methods=[endpoint.method]) for endpoint in ENDPOINTS
        ],
        middleware=[Middleware(guarded)],
        exception_handlers=dict.fromkeys((EffexportError, HTTPException, Exception), refusal),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def guarded(app: ASGIApp) -> ASGIApp:
    """The application behind a check that every request passes first, also those for which there is no endpoint."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        if scope["type"] == "http":
            request = Request(scope)
            try:
                request.app.state.service.check_request(request)
            except RequestError as error:
                answering = await refusal(request, error)
        await answering(scope, receive, send)

    return answer


async def refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with an error."""
    service: Service = request.app.state.service
    kind, message = refusal_of(error), str(error)
    if isinstance(error, HTTPException):
        kind, message = (
            Refusal(error.status_code, "not_served"),
            f"{request.method} {request.scope['path'][:200]}: {error.detail}",
        )
    elif isinstance(error, EffexportError):
        service.metrics_of(request).rejected(kind.reason)
    else:
        message = "the server failed unexpectedly; its log says why"
    headers = {}
    if kind.status == 503:
        headers["retry-after"] = str(service.retry_after_s(request))
    elif kind is UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if kind in (CROWDED, BAD_HEAD) or kind.status in (408, 413, 431):
        # frees a connection, avoids waiting for the rest of a body, or does not guess where the next request begins
        headers["connection"] = "close"
    is_openai = request.scope["path"].startswith(f"{OPENAI}/")
    fields = openai_error(message, kind, getattr(error, "param", None)) if is_openai else {"error": message}
    return json_response(fields, kind.status, headers)


# Time that a client may take to send the head of a request, or the rest of a body that has been answered already.
HEAD_TIMEOUT_S = 10.0
# Requests on one connection that may wait for the answers to earlier ones.
MAX_PIPELINED = 64
# A client that takes less than this of its answer in that time is disconnected.
READ_BYTES = 64 << 10
READ_TIMEOUT_S = 30.0
# Instead of that, if unread answers have more memory than all bodies may have.
URGENT_READ_TIMEOUT_S = 2.0
CHECK_S = 1.0


class Protocol(HttpToolsProtocol):
    """A connection: uvicorn waits forever for heads and for clients that do not read, and limits no head, no trailer
    and no number of pipelined requests.

    held_bytes: memory of answers that the client has not taken completely. held_since: when it last took READ_BYTES.
    """

    held_bytes = 0
    held_since = 0.0
    _left = 0
    # since when the server waits for a head, or for the rest of a body that is answered
    _head_since: float | None = None
    # the request that is being answered; those behind it are in `pipeline`
    _running: RequestResponseCycle | None = None
    # whether a head, or the body after it, has not arrived completely
    _in_message = False
    # bytes that were neither a complete head nor of a body
    _other_bytes = 0
    # the last answer of the connection, after those to the requests before the one that is refused
    _refusal: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None:  # uvicorn only tells the last of several requests
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if not self._in_message and self._is_answered:
            self._await_head()
        self._other_bytes += len(data)
        super().data_received(data)
        if self._other_bytes > MAX_HEAD_BYTES and self._refusal is None:
            self._refuse(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes; send less")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError  # becomes an error of the parser
        super().on_message_begin()
        self._in_message = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Headers after a body must not become those of the request: nobody has checked them.
        if self._head_since is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_since = None
        self._other_bytes = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        if self.parser.should_upgrade():  # to no protocol of this server; the parser reads nothing more
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._other_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._other_bytes = 0
        self._head_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        self._running = None if is_last else self.pipeline[-1][0]
        super().on_response_complete()
        if self not in self.connections:  # the client has gone
            return
        if is_last and self._refusal is not None:
            self._close_with(self._refusal)
        elif self._in_message and self._is_answered:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        if len(self.pipeline) < MAX_PIPELINED:
            self._refuse(400, "what was sent is not a request of HTTP/1.1; this server speaks nothing else")
        else:
            self._refuse(400, f"{MAX_PIPELINED} requests wait on this connection; wait for their answers")

    def resume_writing(self) -> None:
        super().resume_writing()
        self.held_bytes = 0

    @property
    def _is_answered(self) -> bool:
        """True if every request with a complete head has its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_since is None:
            self._head_since = self.loop.time()

    def _give_up(self) -> None:
        if self._in_message and self.cycle is not None and self.cycle.scope is self.scope:
            # the body of a request that has been answered
            self.transport.close()
        else:
            self._refuse(408, f"the head of the request did not arrive within {HEAD_TIMEOUT_S:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Refuse what arrives, and close the connection when the complete requests before it are answered."""
        body = orjson.dumps({"error": message})
        reason = HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._refusal = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        # a request whose body has not arrived is at fault, and the last one
        if self.pipeline and not self._is_answered and self.cycle.more_body:
            self.pipeline.popleft()
        elif self._is_answered or self.cycle.more_body:
            self._close_with(self._refusal)

    def _close_with(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            # not into the middle of an answer, nor as a second answer to one request
            if self.cycle is None or self._is_answered or not self.cycle.response_started:
                self.transport.write(answer)
            self.transport.close()

    def check_client(self, now: float) -> None:
        """Give up a client that sends or reads too slowly; called every CHECK_S. now: of the event loop."""
        if self._head_since is not None and now - self._head_since >= HEAD_TIMEOUT_S:
            self._head_since = None
            self._give_up()
        if not (self.flow.write_paused or self.transport.is_closing()):
            self.held_bytes = 0
            return
        left = self.transport.get_write_buffer_size()
        if not self.held_bytes:
            # uvloop keeps the memory of what the system has taken, until it has taken all
            in_system = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            self.held_bytes, self._left, self.held_since = left + in_system, left, now
        elif self._left - left >= READ_BYTES:
            self._left, self.held_since = left, now
        elif now - self.held_since >= READ_TIMEOUT_S:
            self.transport.abort()


def disconnect_slow_clients(connections: Sequence[Protocol], limit_bytes: int, now: float) -> None:
    """Give up slow clients; those that hardly read sooner, the slowest first, if unread answers exceed the limit.

    now: in the time of the event loop.
    """
    for one in connections:
        one.check_client(now)
    readers = [one for one in connections if one.held_bytes]
    excess = sum(one.held_bytes for one in readers) - limit_bytes
    for reader in sorted(readers, key=lambda one: one.held_since):
        if excess <= 0 or now - reader.held_since < URGENT_READ_TIMEOUT_S:
            return
        excess -= reader.held_bytes
        reader.transport.abort()


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
        self._watching = asyncio.create_task(self._watch_clients())
        self._on_ready()

    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            connections = cast("set[Protocol]", self.server_state.connections)
            limit = self._service.settings.max_bytes_in_memory
            disconnect_slow_clients([*connections], limit, asyncio.get_running_loop().time())

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
        self._watching.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, which would raise the signal again at the end; but a requested stop is a success, and a second
        Ctrl-C ends the process here: Python's own end would abort it, because runs in C++ are in progress."""
        if self.should_exit and sig == signal.SIGINT:
            with contextlib.suppress(OSError):  # nobody reads what it says
                os.write(sys.stderr.fileno(), b"stopped: requests that were running got no answer\n")
            os._exit(128 + sig)
        self.should_exit = True


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
    """Serve until SIGTERM or SIGINT; a second signal, SIGINT, ends the process without waiting for requests.

    The application's lifespan closes the models.
    """
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
