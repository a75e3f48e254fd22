"""The head and the body of a request within limits of size, time and memory; compressed answers."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from effexport.serving.engine.errors import (
    BAD_HEAD,
    LARGE_HEAD,
    NO_MEMORY,
    SLOW_BODY,
    TOO_LARGE,
    UNSUPPORTED_ENCODING,
    ClientGoneError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# zlib's window bits for each encoding; HTTP's deflate is the zlib format.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# How much is decompressed before the limits are checked again.
PIECE_BYTES = 4 << 20


class ByteBudget:
    """A counter of the bytes of all request bodies in memory, with a limit. Only the event loop uses it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextmanager
    def account(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes; they are given back at the end of the block. Raises RequestError."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.used + size > self.limit:
                raise RequestError(
                    f"the server already holds {self.used} of at most {self.limit} bytes of requests; try again later",
                    NO_MEMORY,
                )
            self.used += size
            taken += size

        try:
            yield take
        finally:
            self.used -= taken


async def read_body(
    receive: Receive, headers: Mapping[str, str], max_bytes: int, timeout_s: float, take: Callable[[int], None]
) -> bytes:
    """The decompressed body. take: counts the bytes that are kept.

    Raises RequestError for a body that is too large, too slow, damaged or of an unknown encoding.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", *_WINDOW_BITS):
        raise RequestError(
            f"Content-Encoding is {encoding[:80]!r}; expected gzip, deflate or none", UNSUPPORTED_ENCODING
        )
    declared = headers.get("content-length")
    # the server has checked that it is a number
    if declared is not None and int(declared) > max_bytes:
        raise too_large(f"{declared} bytes", max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await receive_all(receive, max_bytes, take)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s; send it faster", SLOW_BODY) from None
    if encoding == "identity":
        return body
    return await decompressed(body, encoding, max_bytes, take)


@contextmanager
def watched(receive: Receive) -> Iterator[asyncio.Future[None]]:
    """Yield a future that is done when the client of a request has gone; its body has been read."""

    async def client_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(client_gone())
    try:
        yield gone
    finally:
        gone.cancel()


async def receive_all(receive: Receive, max_bytes: int, take: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def decompressed(body: bytes, encoding: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """The decompressed body, in another thread and piece by piece: a small body may hold a thousand times its size.

    Raises RequestError for a damaged body, and before more memory is used than `max_bytes` and `take` allow.
    """
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
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


def compress(body: bytes, encoding: str) -> bytes:
    """Compress fast rather than well: answers hardly get smaller."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return compressor.compress(body) + compressor.flush()


def wanted_encoding(accepted: str | None) -> str | None:
    """gzip or deflate if the client names only that one. If it lists several encodings (the default of most HTTP
    libraries), the answer is not compressed, because compression takes longer than a run."""
    name = (accepted or "").strip().lower()
    return name if name in _WINDOW_BITS else None


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
