"""The state that all endpoints share: models, the memory for request bodies, the token, and the count of answers."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from effexport.serving.engine.errors import CROWDED, UNAUTHORIZED, ClientGoneError, RequestError
from effexport.serving.engine.metrics import RequestMetrics
from effexport.serving.engine.queue import THREAD_BYTES, TextMemory
from effexport.serving.engine.settings import TEXT_CHARACTERS_IN_MEMORY
from effexport.serving.http.body import ByteBudget, check_head, read_body

if TYPE_CHECKING:
    from effexport.serving.http.models import ModelRepository, ServedModel

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
# Method, path and handler of an endpoint.
Endpoint = tuple[str, str, Handler]

# Health probes need no token.
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
# Not an HTTP standard, but customary. Only metrics show it, because the client has gone.
CLIENT_GONE_STATUS = 499


class Service:
    """The state that the endpoints of a server share.

    draining: the server is stopping, so it is not ready.
    is_crowded: whether too many connections are open; then only health probes are answered.
    budget: for the bodies of the requests to all models. text_memory: for the tokens of their texts.
    metrics: of requests that no model answers.
    """

    def __init__(self, models: ModelRepository) -> None:
        self.models = models
        self.settings = models.settings
        self.draining = False
        self.is_crowded: Callable[[], bool] = lambda: False
        self.budget = ByteBudget(self.settings.max_bytes_in_memory)
        self.text_memory = TextMemory(TEXT_CHARACTERS_IN_MEMORY)
        self.metrics = RequestMetrics("")
        self._parsing = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        return self.models.is_ready and not self.draining

    def model(self, request: Request, name: str | None = None) -> ServedModel:
        """The model that the path of a request names, or `name`; the request counts as one of this model from now on.

        Raises RequestError if there is none.
        """
        version = request.path_params.get("version")
        request.state.model = self.models.get(request.path_params["name"] if name is None else name, version)
        model: ServedModel = request.state.model
        return model

    @contextmanager
    def using(self, request: Request, name: str | None = None) -> Iterator[ServedModel]:
        """As `model`; it stays loaded during the block, which should last until the answer is complete."""
        model = self.model(request, name)
        with model.in_use():
            yield model

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts as memory in use during the block. Raises as `read_body`."""
        limits = self.settings.max_request_bytes, self.settings.timeout_s
        with self.budget.account() as take:
            yield await read_body(request.receive, request.headers, *limits, take)

    async def parsed(self, size: int, read: Callable[[], Result]) -> Result:
        """The result of `read`, which reads JSON of `size` bytes. Raises as `read`.

        Much JSON is read in another thread, so that other requests are answered meanwhile; and one request at a time,
        because JSON takes many times its size while it is read.
        """
        if size <= THREAD_BYTES:
            return read()
        async with self._parsing:
            return await asyncio.to_thread(read)

    def metrics_of(self, request: Request) -> RequestMetrics:
        """The metrics of the request's model, or those of the server if it has none."""
        model: ServedModel | None = getattr(request.state, "model", None)
        return self.metrics if model is None else model.metrics

    def retry_after_s(self, request: Request) -> int:
        """For the Retry-After header: until the queue of the request's model is empty, or the longest of all queues."""
        model: ServedModel | None = getattr(request.state, "model", None)
        models = self.models if model is None else [model]
        return max((one.batcher.retry_after_s for one in models), default=1)

    async def counted(self, request: Request, answer: Handler) -> Response:
        """Answer a request and count it with its status and duration."""
        started = time.perf_counter()
        status = 500
        try:
            response = await answer(request)
            status = response.status_code
            return response
        except RequestError as error:
            status = error.kind.status
            raise
        except ClientGoneError:
            status = CLIENT_GONE_STATUS
            return Response(status_code=CLIENT_GONE_STATUS)
        finally:
            self.metrics_of(request).answered(status, time.perf_counter() - started)

    def check_request(self, request: Request) -> None:
        """Raises RequestError for a request that no endpoint may see: with a bad head, without the token, or while
        there are too many connections."""
        scope = request.scope
        query = scope["query_string"]
        check_head(scope["http_version"], scope.get("raw_path", b"") + query, scope["headers"])
        # of the scope, by which endpoints are found: that of request.url depends on the header Host
        if scope["path"] in OPEN_PATHS:
            return
        if self.is_crowded():
            raise RequestError("too many connections are open; try again later", CROWDED)
        self.check_token(request)

    def check_token(self, request: Request) -> None:
        token = self.settings.token
        if token is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        # compared in constant time, so that a token cannot be guessed letter by letter
        if not hmac.compare_digest(given, f"Bearer {token}".encode("ascii")):
            raise RequestError("expected the header Authorization: Bearer, with the token of this server", UNAUTHORIZED)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
