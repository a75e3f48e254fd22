"""The texts that one model generates at a time: a thread that steps all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effexport.errors import UserError
from effexport.runners.decode import Graph
from effexport.serving.engine.errors import FAILED, QUEUE_FULL, STOPPING, WAITED_TOO_LONG, RequestError
from effexport.serving.http.metrics import LATENCY_BUCKETS

if TYPE_CHECKING:
    from effexport.generation.sampling import Sampling
    from effexport.generation.text_generator import Piece, Session, TextGenerator
    from effexport.serving.engine.settings import ServingSettings
    from effexport.serving.http.metrics import Metrics

logger = logging.getLogger("effexport.serving")
# Longer prompts are read by the tokenizer in another thread.
THREAD_CHARACTERS = 2000


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
            raise RequestError(
                f"no token came within {self._timeout_s:g} s; try again later", WAITED_TOO_LONG
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    def put(self, found: list[Piece] | Exception) -> None:
        """What `pieces` returns or raises next."""
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


class Generations:
    """A bounded number of texts, and the thread that decodes one token of each per step.

    Only the event loop counts the texts, and only the thread changes their sessions. New texts go to the thread through
    a list with a lock; pieces come back through the event loop.
    """

    def __init__(self, generator: TextGenerator, settings: ServingSettings, metrics: Metrics) -> None:
        """generator: warmed up, and closed with this. Raises what its runtime raises."""
        warm_up(generator)
        self._generator = generator
        self._timeout_s = settings.timeout_s
        self.most = most_sessions(generator, settings.max_sessions)
        # one for each text, from its request to its end
        self._places: set[object] = set()
        self._metrics = GenerationMetrics(metrics, lambda: len(self._places))
        self._new: list[Stream] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="effexport-generation", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

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
            with self._changed:
                if self._closing:
                    raise RequestError("the server is stopping; send the request to another one", STOPPING)
                self._new.append(stream)
                self._changed.notify()
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

    def close(self) -> None:
        """Finish the accepted texts, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._generator.close()

    def _work(self) -> None:
        stepper = self._generator.stepper
        streams: dict[Session, Stream] = {}
        while True:
            with self._changed:
                while not (self._new or stepper.is_busy):
                    if self._closing:
                        return
                    self._changed.wait()
                arrived, self._new = self._new, []
            for stream in arrived:
                streams[stream.session] = stream
                stepper.add(stream.session)
            started = time.perf_counter()
            stepped = stepper.step()
            if stepped:
                seconds = time.perf_counter() - started
                self._metrics.stepped(sum(streams[session].put_new() for session in stepped), seconds)
            streams = {session: stream for session, stream in streams.items() if not session.ended}


class GenerationMetrics:
    """What a model generates, among the metrics of the model."""

    def __init__(self, metrics: Metrics, sessions: Callable[[], int]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        options: dict[str, Any] = {"labelnames": ("model",), "registry": metrics.registry}

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, **options).labels(metrics.model)

        gauge("effexport_generation_sessions", "Texts that are being generated.").set_function(sessions)
        self._tokens = Counter("effexport_generated_tokens_total", "New tokens.", **options).labels(metrics.model)
        self._step_s = Histogram(
            "effexport_generation_step_seconds",
            "Duration of a step, which gives each text a token and reads new prompts.",
            buckets=LATENCY_BUCKETS,
            **options,
        ).labels(metrics.model)

    def stepped(self, tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._step_s.observe(seconds)


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
