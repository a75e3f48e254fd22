"""Texts that a model generates together: one thread steps all of them, for the event loop of a server or for Triton."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from effexport.base.errors import UserError
from effexport.runners.decode import Graph
from effexport.runners.runner import Closeable
from effexport.serving.engine.errors import FAILED, QUEUE_FULL, STOPPING, WAITED_TOO_LONG, RequestError

if TYPE_CHECKING:
    from effexport.generation.sampling import Sampling
    from effexport.generation.text_generator import Piece, Session, TextGenerator
    from effexport.serving.engine.metrics import Metrics
    from effexport.serving.engine.settings import ServingSettings

logger = logging.getLogger("effexport.serving")
# Longer prompts are read by the tokenizer in another thread.
THREAD_CHARACTERS = 2000


class HasSession(Protocol):
    """A text that somebody waits for."""

    session: Session


Waiter = TypeVar("Waiter", bound=HasSession)


class GenerationLoop(Closeable, Generic[Waiter]):
    """Generates many texts at a time, with one step of the model for all of them. Only its thread changes sessions.

    generator: warmed up, and closed with the loop. max_sessions: texts that grow at the same time; later ones wait.
    max_waiting: how many may wait, 0 for any number. on_step: called by the thread with the texts that have something
    new, and the seconds of the step. finishes: whether the texts that were accepted are finished before it closes.
    """

    finishes = True

    def __init__(
        self,
        generator: TextGenerator,
        max_sessions: int,
        on_step: Callable[[list[Waiter], float], object],
        max_waiting: int = 0,
    ) -> None:
        """Raises what the runtime of the generator raises."""
        warm_up(generator)
        self._generator = generator
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._on_step = on_step
        self._waiting: deque[Waiter] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="effexport-generation", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, text: Waiter) -> None:
        """Begin a text, from any thread. Raises RequestError if too many wait, or the server is stopping."""
        with self._changed:
            if self._closing:
                raise RequestError("the server is stopping; send the request to another one", STOPPING)
            if self._max_waiting and len(self._waiting) >= self._max_waiting:
                raise RequestError(f"{len(self._waiting)} requests are waiting already; try again later", QUEUE_FULL)
            self._waiting.append(text)
            self._changed.notify()

    def close(self) -> None:
        """Finish the accepted texts or drop them, then stop and close the generator."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._generator.close()

    def _work(self) -> None:
        stepper = self._generator.stepper
        running: dict[Session, Waiter] = {}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or stepper.is_busy or self._closing)
                if self._closing and not (self.finishes and (self._waiting or stepper.is_busy)):
                    return
                running = {session: text for session, text in running.items() if not session.ended}
                while self._waiting and len(running) < self._max_sessions:
                    text = self._waiting.popleft()
                    running[text.session] = text
                    stepper.add(text.session)
            started = time.perf_counter()
            stepped = stepper.step()
            if stepped:
                texts = [running[session] for session in stepped if session in running]
                self._on_step(texts, time.perf_counter() - started)


class Stream:
    """The pieces of one text, for the event loop that asked for it. `close` ends the generation, in any state."""

    def __init__(self, session: Session, timeout_s: float, on_close: Callable[[], None]) -> None:
        self.session = session
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._arrived: asyncio.Queue[list[Piece] | Exception] = asyncio.Queue()

    async def pieces(self) -> list[Piece]:
        """The next pieces, at least one; not called after the last.

        Raises RequestError if there are none in time or the model failed, and ClientGoneError.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._arrived.get()
        except TimeoutError:
            message = f"no token came within {self._timeout_s:g} s; try again later"
            raise RequestError(message, WAITED_TOO_LONG) from None
        if isinstance(found, Exception):
            raise found
        return found

    def put(self, found: list[Piece] | Exception) -> None:
        """Set what `pieces` returns or raises next."""
        self._arrived.put_nowait(found)

    def put_new(self) -> int:
        """Put what the session has added; from the thread that steps it. Returns the number of new tokens."""
        session = self.session
        pieces = [session.pieces.popleft() for _ in range(len(session.pieces))]
        if pieces:
            self._put_from_thread(pieces)
        if session.error is not None:
            logger.error("a text could not be continued: %s", session.error)
            self._put_from_thread(RequestError(str(session.error), FAILED))
        return sum(piece.finish_reason != "eos" for piece in pieces)

    def _put_from_thread(self, found: list[Piece] | Exception) -> None:
        # if the loop has ended, nobody waits for the text
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.put, found)

    def close(self) -> None:
        self.session.cancel()
        self._on_close()


class Generations(GenerationLoop[Stream]):
    """The texts that a server generates at a time. None waits: further ones are refused.

    Only the event loop counts the texts; pieces come back through it.
    """

    def __init__(self, generator: TextGenerator, settings: ServingSettings, metrics: Metrics) -> None:
        """generator: warmed up, and closed with this. Raises what its runtime raises."""
        self._timeout_s = settings.timeout_s
        self.most = most_sessions(generator, settings.max_sessions)
        # one for each text, from its request to its end
        self._places: set[object] = set()
        self._metrics = metrics
        metrics.observe_generation(lambda: len(self._places))
        super().__init__(generator, self.most, self._send)

    def _send(self, streams: list[Stream], seconds: float) -> None:
        self._metrics.stepped(sum(stream.put_new() for stream in streams), seconds)

    def refuse_if_full(self) -> None:
        if len(self._places) >= self.most:
            raise RequestError(f"{self.most} texts are being generated; try again later", QUEUE_FULL)

    async def submit(self, prompt: str, sampling: Sampling) -> Stream:
        """Begin a text. Raises RequestError for a prompt that cannot be continued, or if there are too many texts."""
        # before the prompt is read, so that of a crowd no more prompts are in memory than may be continued
        self.refuse_if_full()
        place = object()
        self._places.add(place)
        try:
            session = await self._session(prompt, sampling)
            stream = Stream(session, self._timeout_s, lambda: self._places.discard(place))
            self.add(stream)
        except BaseException:
            self._places.discard(place)
            raise
        return stream

    async def _session(self, prompt: str, sampling: Sampling) -> Session:
        try:
            if len(prompt) > THREAD_CHARACTERS:
                return await asyncio.to_thread(self._generator.session, prompt, sampling)
            return self._generator.session(prompt, sampling)
        except UserError as error:
            raise RequestError(str(error)) from error


def most_sessions(generator: TextGenerator, wanted: int) -> int:
    """The largest batch, up to `wanted`, that the decoder takes: engines have limits."""
    accepts = generator.stepper.decoder.accepts
    return next((count for count in range(wanted, 0, -1) if accepts(Graph.STEP, count, 1)), 1)


def warm_up(generator: TextGenerator) -> None:
    """Read a prompt and decode one step, so that the first text does not pay for one-time work.

    The generator is closed if it fails.
    """
    import numpy as np

    decoder, token = generator.stepper.decoder, np.zeros((1, 1), dtype=np.int64)
    if generator.max_tokens < 2:
        return
    try:
        if decoder.has_prefill:
            decoder.prefill({"input_ids": token})
        decoder.step({"input_ids": token})
        decoder.reset()
    except BaseException:
        generator.close()
        raise
