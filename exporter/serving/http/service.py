"""The state that all endpoints share, and their requests: heads and bodies within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import hmac
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from effexport.base.errors import EffexportError
from effexport.serving.engine.errors import (
    BAD_HEAD,
    CROWDED,
    LARGE_HEAD,
    NO_MEMORY,
    SLOW_BODY,
    TOO_LARGE,
    UNAUTHORIZED,
    UNSUPPORTED_ENCODING,
    ClientGoneError,
    RequestError,
    refusal_of,
)
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.queue import THREAD_BYTES, TextMemory
from effexport.serving.engine.settings import TEXT_CHARACTERS_IN_MEMORY

if TYPE_CHECKING:
    from effexport.serving.http.models import ModelRepository, ServedModel


# zlib's window bits for each encoding; HTTP's deflate is the zlib format.
ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# How much is decompressed before the limits are checked again.
PIECE_BYTES = 4 << 20


async def read_body(request: Request, max_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
    """The decompressed body. take: counts the bytes that are kept.

    Raises RequestError for a body that is too large, too slow, damaged or of an unknown encoding; ClientGoneError.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", *ENCODINGS):
        raise RequestError(
            f"Content-Encoding is {encoding[:80]!r}; expected gzip, deflate or none", UNSUPPORTED_ENCODING
        )
    declared = request.headers.get("content-length")
    # the server has checked that it is a number
    if declared is not None and int(declared) > max_bytes:
        raise too_large(f"{declared} bytes", max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large(f"more than {max_bytes} bytes", max_bytes)
                take(len(part))
                parts += [part] if part else []  # the last is empty
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s; send it faster", SLOW_BODY) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    body = b"".join(parts)  # itself, if there is one
    return body if encoding == "identity" else await decompressed(body, encoding, max_bytes, take)


@contextmanager
def watched(receive: Receive) -> Iterator[None]:
    """End the block with ClientGoneError when the client of a request has gone; its body has been read."""
    block, is_gone = asyncio.current_task(), False
    assert block is not None, "a request is answered by a task"

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        block.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and not block.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()


async def decompressed(body: bytes, encoding: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """The decompressed body, in another thread and piece by piece: a small body may hold a thousand times its size.

    Raises RequestError for a damaged body, and before more memory is used than `max_bytes` and `take` allow.
    """
    decompressor = zlib.decompressobj(ENCODINGS[encoding])
    parts: list[bytes] = []
    size, left = 0, body
    while not decompressor.eof and (left or not parts):
        try:
            part = await asyncio.to_thread(decompressor.decompress, left, PIECE_BYTES)
        except zlib.error as error:
            raise RequestError(f"the body is not {encoding}: {error}") from None
        left = decompressor.unconsumed_tail
        size += len(part)
        if size > max_bytes:
            raise too_large(f"more than {max_bytes} bytes when decompressed", max_bytes)
        take(len(part))
        parts.append(part)
    if not decompressor.eof or decompressor.unused_data:
        raise RequestError(f"the body is not one complete {encoding} stream")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(given: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"the body has {given}; this server takes at most {max_bytes}: send less, or start it with a larger "
        "--max-request-bytes",
        TOO_LARGE,
    )


# Of the path and all headers of a request, and of what surrounds the parts of a chunked body.
MAX_HEAD_BYTES = 32 << 10
VERSIONS = ("1.0", "1.1")
# Headers that decide what a request means.
SINGLE = (
    b"authorization",
    b"content-encoding",
    b"content-length",
    b"host",
    b"inference-header-content-length",
    b"transfer-encoding",
)


def check_head(version: str, path: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises RequestError for a head that is too large or ambiguous. headers: their names in lower case.

    version: of HTTP, such as "1.1". path: with the query.
    """
    size = len(path) + sum(len(name) + len(value) + 4 for name, value in headers)  # 4: what stands around them
    if size > MAX_HEAD_BYTES:
        raise RequestError(
            f"the path and the headers have {size} bytes; expected at most {MAX_HEAD_BYTES}: send less", LARGE_HEAD
        )
    if version not in VERSIONS:
        raise RequestError(f"the request is HTTP/{version}; expected HTTP/1.1", BAD_HEAD)
    counts = Counter(name for name, _ in headers)
    for name in SINGLE:
        if counts[name] > 1:
            raise RequestError(f"the header {name.decode()} is given {counts[name]} times; expected once", BAD_HEAD)
    if version == "1.1" and not counts[b"host"]:
        raise RequestError("the request has no header Host; expected one, as HTTP/1.1 requires", BAD_HEAD)
    values = dict(headers)
    coding = values.get(b"transfer-encoding", b"chunked").strip().lower()
    if coding != b"chunked":
        raise RequestError(
            f"Transfer-Encoding is {coding[:80].decode('latin-1')!r}; expected chunked, or Content-Length", BAD_HEAD
        )
    if b"upgrade" in counts and (b"transfer-encoding" in counts or values.get(b"content-length", b"0") != b"0"):
        # the parser takes what follows the head for the new protocol
        raise RequestError("the request has the header Upgrade and a body; expected HTTP/1.1 without it", BAD_HEAD)


Result = TypeVar("Result")

# Health probes need no token.
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
# Not an HTTP standard, but customary. Only metrics show it, because the client has gone.
CLIENT_GONE_STATUS = 499


@dataclass(frozen=True)
class Endpoint:
    """A row of a protocol. counts: whether its answers are in the metrics of the request's model."""

    method: str
    path: str
    handler: Callable[[Service, Request], Awaitable[Response]]
    counts: bool = False


class Service:
    """The state that the endpoints of a server share.

    draining: the server is stopping, so it is not ready.
    is_crowded: whether too many connections are open; then only health probes are answered.
    body_bytes: of the bodies of all requests in memory. text_memory: for the tokens of their texts.
    metrics: of requests that no model answers.
    """

    def __init__(self, models: ModelRepository) -> None:
        self.models = models
        self.settings = models.settings
        self.draining = False
        self.is_crowded: Callable[[], bool] = lambda: False
        self.body_bytes = 0
        self.text_memory = TextMemory(TEXT_CHARACTERS_IN_MEMORY)
        self.metrics = Metrics("")
        self._parsing = asyncio.Lock()

    @contextmanager
    def using(self, request: Request, name: str | None = None) -> Iterator[ServedModel]:
        """The model that the path of a request names, or `name`; the request counts as one of this model from now on.

        It stays loaded during the block, which should last until the answer is complete. Raises RequestError if there
        is none.
        """
        wanted, version = name or request.path_params.get("name", ""), request.path_params.get("version")
        model = request.state.model = self.models.get(wanted, version)
        with model.in_use():
            yield model

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts as memory in use during the block.

        Raises as `read_body`, and RequestError if the bodies of all requests have too many bytes.
        """
        taken, limit = 0, self.settings.max_bytes_in_memory

        def take(size: int) -> None:
            nonlocal taken
            if self.body_bytes + size > limit:
                raise RequestError(
                    f"the server already holds {self.body_bytes} of at most {limit} bytes of requests; try again later",
                    NO_MEMORY,
                )
            self.body_bytes += size
            taken += size

        try:
            yield await read_body(request, self.settings.max_request_bytes, self.settings.timeout_s, take)
        finally:
            self.body_bytes -= taken

    async def parsed(self, size: int, read: Callable[[], Result]) -> Result:
        """The result of `read`, which reads JSON of `size` bytes. Raises as `read`.

        Much JSON is read in another thread, so that other requests are answered meanwhile; and one request at a time,
        because JSON takes many times its size while it is read.
        """
        if size <= THREAD_BYTES:
            return read()
        async with self._parsing:
            return await asyncio.to_thread(read)

    def metrics_of(self, request: Request) -> Metrics:
        """The metrics of the request's model, or those of the server if it has none."""
        model: ServedModel | None = getattr(request.state, "model", None)
        return self.metrics if model is None else model.metrics

    def retry_after_s(self, request: Request) -> int:
        """For the Retry-After header: until the queue of the request's model is empty, or the longest of all queues."""
        model: ServedModel | None = getattr(request.state, "model", None)
        models = self.models if model is None else [model]
        return max((one.batcher.retry_after_s for one in models), default=1)

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request, and count it with its status and duration if the endpoint says so."""
        if not endpoint.counts:
            return await endpoint.handler(self, request)
        started = time.perf_counter()
        status = 500
        try:
            response = await endpoint.handler(self, request)
            status = response.status_code
            return response
        except EffexportError as error:
            status = refusal_of(error).status
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
        given, expected = request.headers.get("authorization", ""), f"Bearer {self.settings.token}"
        # compared in constant time, so that a token cannot be guessed letter by letter
        if self.settings.token is not None and not hmac.compare_digest(given.encode("latin-1"), expected.encode()):
            raise RequestError("expected the header Authorization: Bearer, with the token of this server", UNAUTHORIZED)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
