"""Many requests that generate text at the same time: one thread steps all sessions, another one sends new text.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from effexport.errors import EffexportError
from effexport.runners.runner import Closeable

if TYPE_CHECKING:
    from effexport.generation.sampling import Sampling
    from effexport.generation.text_generator import FinishReason, Session, TextGenerator

# Asking the server whether a client is still there takes a tenth of a millisecond, as long as a step of a small model.
CANCEL_CHECK_SECONDS = 0.05


class OverloadedError(EffexportError):
    """As many requests wait as may wait."""


class Reply(Protocol):
    """The way back to the client of one request."""

    def send(self, text: str, session: Session, finish_reason: FinishReason | None) -> None:
        """Send more text of a session; with a reason, the last."""

    def fail(self, error: EffexportError) -> None:
        """Send an error in place of more text."""

    def cancel(self, session: Session) -> None:
        """End without more text, because the client has gone."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""


class TextStream:
    """A request that is being answered. in_pieces: send text as it arrives, instead of all at the end."""

    def __init__(self, session: Session, reply: Reply, *, in_pieces: bool) -> None:
        self.session = session
        self._reply = reply
        self._in_pieces = in_pieces
        self._text = ""
        self._next_check = 0.0
        self._done = False

    def send_new(self) -> None:
        """Send what the session has added since the last call, or end it if the client has gone."""
        session = self.session
        if self._done:
            return
        if time.monotonic() >= self._next_check:
            if self._reply.is_cancelled():
                self._done = True
                session.cancel()
                self._reply.cancel(session)
                return
            self._next_check = time.monotonic() + CANCEL_CHECK_SECONDS
        reason = None
        while session.pieces:
            piece = session.pieces.popleft()
            self._text += piece.text
            reason = piece.finish_reason
        self._done = session.error is not None or reason is not None
        if session.error is not None:
            self._reply.fail(session.error)
        elif reason is not None or (self._in_pieces and self._text):
            self._reply.send(self._text, session, reason)
            self._text = ""


class GenerationLoop(Closeable):
    """Generates text for many requests at a time, with one step of the model for all of them.

    max_sessions: how many requests generate at the same time; later ones wait. max_waiting: how many may wait, 0 for
    any number.
    """

    def __init__(self, generator: TextGenerator, max_sessions: int, max_waiting: int = 0) -> None:
        self._generator = generator
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[TextStream] = deque()
        self._running: dict[Session, TextStream] = {}
        # streams with something to send, each once, however many steps ago
        self._unsent: dict[TextStream, None] = {}
        self._closed = False
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._step, self._send)]
        for thread in self._threads:
            thread.start()

    def add(self, prompt: str, sampling: Sampling, reply: Reply, *, in_pieces: bool) -> None:
        """Begin to answer a request. From any thread.

        Raises UserError for a prompt that cannot be continued, and OverloadedError if too many requests wait.
        """
        stream = TextStream(self._generator.session(prompt, sampling), reply, in_pieces=in_pieces)
        with self._changed:
            if self._max_waiting and len(self._waiting) >= self._max_waiting:
                raise OverloadedError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(stream)
            self._changed.notify_all()

    def _step(self) -> None:
        stepper = self._generator.stepper
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or stepper.is_busy or self._closed)
                if self._closed:
                    return
                while self._waiting and len(self._running) < self._max_sessions:
                    stream = self._waiting.popleft()
                    self._running[stream.session] = stream
                    stepper.add(stream.session)
            advanced = stepper.step()
            with self._changed:
                self._unsent |= {self._running[session]: None for session in advanced}
                self._running = {session: stream for session, stream in self._running.items() if not session.ended}
                self._changed.notify_all()

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if self._closed:
                    return
                streams, self._unsent = self._unsent, {}
            for stream in streams:
                try:
                    stream.send_new()
                except Exception:  # the server does not say which error it raises for a connection that has gone
                    stream.session.cancel()

    def close(self) -> None:
        """Stop both threads, and close the generator. Requests that are not answered yet get no more answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._generator.close()
