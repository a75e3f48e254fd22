"""Read and decompress request bodies within limits of size, time and memory; compress answers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from effexport.serving.protocol.errors import (
    NO_MEMORY,
    SLOW_BODY,
    TOO_LARGE,
    UNSUPPORTED_ENCODING,
    ClientGoneError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# zlib's window bits for each encoding; HTTP's deflate is the zlib format.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# What reads or writes more is done in another thread, because no other request is read in the meantime.
THREAD_BYTES = 64 << 10
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


async def aside(size: int, call: Callable[[], Result]) -> Result:
    """The result of a call that reads or writes so many bytes, in another thread if they are many."""
    return await asyncio.to_thread(call) if size > THREAD_BYTES else call()


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
