"""Reading bodies: size, time and memory are limited before bytes are kept; compressed ones are unpacked within them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# How zlib is told what it unpacks: HTTP's deflate is the zlib format.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Beyond this size, packing and unpacking are left to another thread.
THREAD_BYTES = 64 << 10


class ByteBudget:
    """How many bytes of bodies are in memory, of all requests together. Used by the event loop alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextmanager
    def account(self) -> Iterator[Callable[[int], None]]:
        """What is taken within the block is given back at its end. Taking too much raises RequestError."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.used + size > self.limit:
                raise RequestError(
                    f"the server holds {self.used} bytes of other requests, of at most {self.limit}; try again later",
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
    """The body, unpacked. take: accounts for bytes that are kept.

    Raises RequestError for one that is too large, too slow, damaged or of an unknown encoding.
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
    if len(body) > THREAD_BYTES:
        unpacked = await asyncio.to_thread(decompress, body, encoding, max_bytes)
    else:
        unpacked = decompress(body, encoding, max_bytes)
    take(len(unpacked))
    return unpacked


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


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Never more than `max_bytes`, however well the body was packed."""
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not {encoding}: {error}") from None
    if len(unpacked) > max_bytes:
        raise too_large(f"more than {max_bytes} bytes when unpacked", max_bytes)
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(f"the body is not one complete {encoding} stream")
    return unpacked


def compress(body: bytes, encoding: str) -> bytes:
    """Fast rather than small: what answers hold hardly gets smaller."""
    packer = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return packer.compress(body) + packer.flush()


def wanted_encoding(accepted: str | None) -> str | None:
    """gzip or deflate, for a client that names that alone: it asks for it. A list, which HTTP libraries send unasked,
    only allows it, and packing takes longer than a run."""
    name = (accepted or "").strip().lower()
    return name if name in _WINDOW_BITS else None


def too_large(given: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"the body has {given}; this server takes at most {max_bytes}: send less, or start it with a larger "
        "--max-request-bytes",
        TOO_LARGE,
    )
