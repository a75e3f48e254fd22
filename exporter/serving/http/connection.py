"""One connection of the server: uvicorn's protocol, with limits for clients that are slow, rude or malicious."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from effexport.serving.http.body import MAX_HEAD_BYTES

# Time that a client may take to send the head of a request, or the rest of a body that has been answered already.
HEAD_TIMEOUT_S = 10.0
# Requests on one connection that may wait for the answers to earlier ones.
MAX_PIPELINED = 64
# A client that takes less than this of its answer in that time is disconnected.
READ_BYTES = 64 << 10
READ_TIMEOUT_S = 30.0
# Instead of that, if unread answers have more memory than all bodies may have.
URGENT_READ_TIMEOUT_S = 2.0
READ_CHECK_S = 1.0
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Protocol(HttpToolsProtocol):
    """A connection: uvicorn waits forever for heads and for clients that do not read, and limits no head, no trailer
    and no number of pipelined requests.

    held_bytes: memory of answers that the client has not taken completely. held_since: when it last took READ_BYTES.
    """

    held_bytes = 0
    held_since = 0.0
    _left = 0
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
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
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        if self._running is not None:  # uvicorn only tells the last of several requests
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if not self._in_message and self._is_answered:
            self._start_head_timer()
        self._other_bytes += len(data)
        super().data_received(data)
        if self._other_bytes > MAX_HEAD_BYTES and self._refusal is None:
            self._refuse(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes; send less")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError  # becomes an error of the parser
        super().on_message_begin()
        self._in_message = True
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Headers after a body must not become those of the request: nobody has checked them.
        if self._head_timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
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
        self._stop_head_timer()
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
            self._start_head_timer()
        if self.transport.is_closing():
            self._start_read_timer()

    def send_400_response(self, msg: str) -> None:
        if len(self.pipeline) < MAX_PIPELINED:
            self._refuse(400, "what was sent is not a request of HTTP/1.1; this server speaks nothing else")
        else:
            self._refuse(400, f"{MAX_PIPELINED} requests wait on this connection; wait for their answers")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_read_timer()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._start_read_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_read_timer()

    @property
    def _is_answered(self) -> bool:
        """True if every request with a complete head has its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self._in_message and self.cycle is not None and self.cycle.scope is self.scope:
            # the body of a request that has been answered
            self.transport.close()
            self._start_read_timer()
        else:
            self._refuse(408, f"the head of the request did not arrive within {HEAD_TIMEOUT_S:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Refuse what arrives, and close the connection when the complete requests before it are answered."""
        body = orjson.dumps({"error": message})
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._refusal = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        if not self._is_answered and self.cycle.more_body:  # the request at fault is the last one
            if not self.pipeline:
                self._close_with(self._refusal)
            else:
                self.pipeline.popleft()
        elif self._is_answered:
            self._close_with(self._refusal)

    def _close_with(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            # not into the middle of an answer, nor as a second answer to one request
            if self.cycle is None or self._is_answered or not self.cycle.response_started:
                self.transport.write(answer)
            self.transport.close()
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        """Watch how the client takes what it has not taken yet."""
        if self._read_timer is None:
            self._left = self.transport.get_write_buffer_size()
            # uvloop keeps the memory of what the system has taken, until it has taken all
            in_system = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            self.held_bytes = self._left + in_system
            self.held_since = self.loop.time()
            self._read_timer = self.loop.call_later(READ_CHECK_S, self._check_reading)

    def _stop_read_timer(self) -> None:
        self.held_bytes = 0
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_reading(self) -> None:
        self._read_timer = self.loop.call_later(READ_CHECK_S, self._check_reading)
        left, now = self.transport.get_write_buffer_size(), self.loop.time()
        if self._left - left >= READ_BYTES:
            self._left, self.held_since = left, now
        elif now - self.held_since >= READ_TIMEOUT_S:
            self.transport.abort()


def disconnect_slow_readers(connections: Iterable[Protocol], limit_bytes: int, now: float) -> None:
    """Free the memory of answers that are hardly read, the slowest first, if unread answers have more than the limit.

    now: in the time of the event loop.
    """
    readers = [one for one in connections if one.held_bytes]
    excess = sum(one.held_bytes for one in readers) - limit_bytes
    for reader in sorted(readers, key=lambda one: one.held_since):
        if excess <= 0 or now - reader.held_since < URGENT_READ_TIMEOUT_S:
            return
        excess -= reader.held_bytes
        reader.transport.abort()
