"""Texts that are answered by the task of an artifact, and texts that a model generates.

Each request has its own options. One thread steps all texts that are generated together, for the event loop of a server
or for Triton.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from effexport.base.errors import UserError
from effexport.models.encoder.spec import EMBEDDING
from effexport.models.validation import shown
from effexport.runners.decode import Graph
from effexport.serving.engine.errors import FAILED, QUEUE_FULL, WAITED_TOO_LONG, ClientGoneError, RequestError
from effexport.serving.engine.queue import Batcher, Queue, Waiting, aside
from effexport.serving.engine.settings import MAX_TEXTS
from effexport.serving.engine.signature import ANSWER, CONTEXT, OPTIONS, STREAM, TEXT, ServedSignature, unknown_name
from effexport.tasks.sampling import ALIASES, Sampling
from effexport.tasks.task import DEFAULT_OPTIONS, TOKENS, Encoding, PreparedText, Task, TextOptions, joined_outputs
from effexport.tasks.tasks import Embedding

if TYPE_CHECKING:
    from effexport.serving.engine.metrics import Metrics
    from effexport.tasks.text_generator import Piece, Session, TextGenerator


# Shorter texts and prompts are tokenised in less than a millisecond.
THREAD_CHARACTERS = 2048
TEXT_OPTIONS = tuple(field.name for field in fields(TextOptions))


def options_from_parameters(parameters: Mapping[str, Any]) -> TextOptions:
    """Raises UserError for a parameter that is unknown or cannot work."""
    for name, value in parameters.items():
        if name not in TEXT_OPTIONS:
            raise unknown_name(name, TEXT_OPTIONS, "parameter")
        if type(value) is not int:
            raise UserError(f"{name} is {shown(value)}; expected an integer")
    return TextOptions(**parameters)


# A text that is not tokenised yet: its characters, and what makes inputs of it, which raises UserError.
Unprepared = tuple[int, Callable[[], PreparedText]]


class Texts:
    """The texts of a served model: each is a request to its queue, or several if its windows are more rows than a run
    has."""

    def __init__(self, task_of: Callable[[TextOptions], Task], batcher: Batcher, signature: ServedSignature) -> None:
        self._task_of = task_of
        self._default = task_of(DEFAULT_OPTIONS)
        self._batcher = batcher
        self._signature = signature
        self.name = self._default.name
        self.is_embedding = isinstance(self._default, Embedding)
        # names and datatypes of the outputs
        self.outputs = {ANSWER: "BYTES", **({EMBEDDING: "FP32"} if self.is_embedding else {})}

    def metadata(self) -> dict[str, Any]:
        """The texts that a client may send instead of tensors, and its answers: `parameters` of the V2 metadata."""
        inputs = [TEXT, *([CONTEXT] if self.name == "question-answering" else [])]
        return {
            "task": self.name,
            "text_inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in inputs],
            "text_outputs": [
                {"name": name, "datatype": datatype, "shape": [-1, -1] if name == EMBEDDING else [-1]}
                for name, datatype in self.outputs.items()
            ],
            "text_parameters": list(TEXT_OPTIONS),
        }

    async def answers_of(
        self, texts: Sequence[tuple[str, str | None]], parameters: Mapping[str, Any], waiting: Waiting
    ) -> list[Any]:
        """The answers to texts, or to pairs of texts. parameters: of the request; some are options of the task.

        Raises ClientGoneError, or UserError with the index of a text that cannot be answered.
        """
        given = {name: parameters[name] for name in TEXT_OPTIONS if parameters.get(name) is not None}
        task = self._task_of(options_from_parameters(given))
        prepared = [(len(text) + len(pair or ""), partial(task.prepare, text, pair)) for text, pair in texts]
        return await self._answers(task, prepared, waiting)

    async def embeddings_of(self, inputs: Sequence[str | tuple[int, ...]], waiting: Waiting) -> list[Any]:
        """{embedding, tokens} of each text, or of tokens that the client has made. Raises as `answers_of`."""
        task = self._default
        assert isinstance(task, Embedding)
        texts: list[Unprepared] = [
            (len(one), partial(task.prepare, one) if isinstance(one, str) else partial(prepared_tokens, task, one))
            for one in inputs
        ]
        return await self._answers(task, texts, waiting)

    async def _answers(self, task: Task, texts: Sequence[Unprepared], waiting: Waiting) -> list[Any]:
        # so many that the next batch waits while one runs, and other requests find room
        settings = self._batcher.settings
        places = asyncio.Semaphore(max(1, min(2 * settings.max_batch, settings.queue_size // 2)))

        async def one(index: int) -> Any:
            try:
                async with places, waiting.memory.holding(texts[index][0], waiting.timeout_s):
                    return await self._answer(task, *texts[index], waiting)
            except UserError as error:
                if len(texts) == 1 or isinstance(error, RequestError):
                    raise
                raise UserError(f"text {index}: {error}") from error

        # texts of similar length follow each other, so that more of them share a run
        order = sorted(range(len(texts)), key=lambda index: texts[index][0])
        answers = {index: asyncio.create_task(one(index)) for index in order}
        try:
            await asyncio.gather(*answers.values())
        finally:
            for answer in answers.values():
                answer.cancel()
        return [answers[index].result() for index in range(len(texts))]

    async def _answer(self, task: Task, characters: int, prepare: Callable[[], PreparedText], waiting: Waiting) -> Any:
        prepared = await asyncio.to_thread(prepare) if characters > THREAD_CHARACTERS else prepare()
        windows = len(prepared.windows)
        if windows > MAX_TEXTS:
            raise UserError(f"the text is {windows} windows; expected at most {MAX_TEXTS}: send it in parts")
        parts = []
        for rows in prepared.rows(self._batcher.settings.max_batch):
            self._signature.check_size("seq", rows[TOKENS].shape[1])
            feeds = self._signature.complete(rows)
            parts.append(await self._batcher.outputs(feeds, waiting.timeout_s, waiting.gone))
        size = sum(array.nbytes for part in parts for array in part.values())
        return await aside(size, lambda: task.answer(prepared, joined_outputs(parts)))


def prepared_tokens(task: Embedding, ids: Sequence[int]) -> PreparedText:
    """Tokens as one row, with those that the tokenizer would add if the client has added them."""
    count, reader = len(ids), task.reader
    if reader.limit is not None and count > reader.limit:
        raise UserError(f"the input has {count} tokens; this model takes {reader.limit}: shorten or split it")
    encoding = Encoding(tuple(ids), (0,) * count, (False,) * count, ((0, 0),) * count, (0,) * count, (None,) * count)
    return reader.prepared("", None, encoding, [tuple(range(count))])


logger = logging.getLogger("effexport.serving")


def sampling_from_options(given: Iterable[tuple[str, Any]]) -> tuple[Sampling, Any]:
    """The sampling that the options of a request ask for, and the value of `stream`; None counts as not given.

    Raises UserError for an option that is unknown, is given twice, or cannot work.
    """
    names, found = [tensor.name for tensor in OPTIONS], dict[str, Any]()
    for name, value in given:
        own = ALIASES.get(name, name)
        if own not in names:
            raise unknown_name(name, [*names, *ALIASES], "parameter")
        if own in found:
            raise RequestError(f"the parameter {own} is given twice")
        found[own] = value
    stream = found.pop(STREAM, None)
    return Sampling(**{name: value for name, value in found.items() if value is not None}), stream


class Stream:
    """The pieces of one text, for the event loop that asked for it. `close` ends the generation, in any state.

    counted: the tokens that are in the metrics.
    """

    counted = 0

    def __init__(self, session: Session, timeout_s: float | None, on_close: Callable[[], None]) -> None:
        self.session = session
        self.loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._client_gone = False
        self._changed = asyncio.Event()

    async def pieces(self) -> list[Piece]:
        """The next pieces, at least one; not called after the last.

        Raises RequestError if there are none in time or the model failed, and ClientGoneError.
        """
        session = self.session
        try:
            async with asyncio.timeout(self._timeout_s):
                while not session.pieces:
                    if self._client_gone:
                        raise ClientGoneError
                    if session.error is not None:
                        logger.error("a text could not be continued: %s", session.error)
                        raise RequestError(str(session.error), FAILED)
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            message = f"no token came within {self._timeout_s:g} s; try again later"
            raise RequestError(message, WAITED_TOO_LONG) from None
        return [session.pieces.popleft() for _ in range(len(session.pieces))]

    def wake(self) -> None:
        """Let `pieces` look for what is new."""
        self._changed.set()

    def client_gone(self) -> None:
        """Let `pieces` raise ClientGoneError after the pieces that there are."""
        self._client_gone = True
        self.wake()

    def close(self) -> None:
        self.session.cancel()
        self._on_close()


class Generations(Queue[Stream]):
    """Generates many texts at a time, with one step of the model for all of them. Only its thread changes sessions, and
    only the event loop counts the texts; pieces come back through it.

    generator: warmed up, and closed with this. max_sessions: texts that grow at the same time. max_waiting: how many
    more may wait, None for any number; further ones are refused. timeout_s: of the wait for a piece. finishes: whether
    the texts that were accepted are finished before it closes.
    """

    def __init__(
        self,
        generator: TextGenerator,
        max_sessions: int,
        *,
        max_waiting: int | None = 0,
        timeout_s: float | None = None,
        finishes: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        """Raises what the runtime of the generator raises."""
        warm_up(generator)
        self._generator = generator
        # the largest batch that the decoder takes: engines have limits
        accepts = generator.stepper.decoder.accepts
        self.most = next((n for n in range(max_sessions, 0, -1) if accepts(Graph.STEP, n, 1)), 1)
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._finishes = finishes
        # one for each text, from its request to its end
        self._places: set[object] = set()
        self._metrics = metrics
        if metrics is not None:
            metrics.add_generation()
            metrics.sessions.set_function(lambda: len(self._places))
        super().__init__("effexport-generation", self._work)

    def refuse_if_full(self) -> None:
        """Raises RequestError if there are as many texts as may grow and wait."""
        if self._max_waiting is not None and len(self._places) >= self.most + self._max_waiting:
            raise RequestError(f"{len(self._places)} texts are being generated; try again later", QUEUE_FULL)

    async def submit(self, prompt: str, sampling: Sampling) -> Stream:
        """Begin a text. Raises UserError for a prompt that cannot be continued, or if there are too many texts."""
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
        if len(prompt) > THREAD_CHARACTERS:
            return await asyncio.to_thread(self._generator.session, prompt, sampling)
        return self._generator.session(prompt, sampling)

    def close(self) -> None:
        """Finish the accepted texts or drop them, then stop and close the generator."""
        super().close()
        self._generator.close()

    def _work(self) -> None:
        stepper = self._generator.stepper
        running: dict[Session, Stream] = {}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or stepper.is_busy or self._closing)
                if self._closing and not (self._finishes and (self._waiting or stepper.is_busy)):
                    return
                running = {session: stream for session, stream in running.items() if not session.ended}
                while self._waiting and len(running) < self.most:
                    stream = self._waiting.popleft()
                    running[stream.session] = stream
                    stepper.add(stream.session)
            started = time.perf_counter()
            stepped = stepper.step()
            if stepped:
                streams = [running[session] for session in stepped if session in running]
                self._stepped(streams, time.perf_counter() - started)

    def _stepped(self, streams: Sequence[Stream], seconds: float) -> None:
        """Count a step, and wake those who wait for its texts, in one call for each event loop."""
        if self._metrics is not None:
            self._metrics.step_s.observe(seconds)
            for stream in streams:
                self._metrics.tokens.inc(stream.session.count - stream.counted)
                stream.counted = stream.session.count

        def wake(loop: asyncio.AbstractEventLoop) -> None:
            for stream in streams:
                if stream.loop is loop:
                    stream.wake()

        for loop in {stream.loop for stream in streams}:
            # if the loop has ended, nobody waits for its texts
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake, loop)


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
