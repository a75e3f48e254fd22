"""Texts that are answered by the task of an artifact, and texts that a model generates.

Each request has its own options. One thread steps all texts that are generated together, for the event loop of a server
or for Triton.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from effexport.base.dtypes import Array
from effexport.base.errors import UserError
from effexport.models.encoder.spec import EMBEDDING
from effexport.runners.decode import Graph
from effexport.serving.engine.errors import FAILED, QUEUE_FULL, WAITED_TOO_LONG, RequestError
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.queue import Outputs, Queue, Waiting, aside, logger
from effexport.serving.engine.settings import MAX_TEXTS
from effexport.serving.engine.signature import ANSWER, CONTEXT, FINISH_REASON, TEXT, TEXT_OUTPUT, named_by, objects
from effexport.tasks.sampling import Sampling
from effexport.tasks.task import DEFAULT_OPTIONS, TEXT_OPTIONS, PreparedText, Task, TextOptions, joined_outputs
from effexport.tasks.tasks import Embedding
from effexport.tasks.text_generator import Piece, Session, TextGenerator

# Shorter texts and prompts are tokenised in less than a millisecond.
THREAD_CHARACTERS = 2048


class Texts:
    """The texts of a model that reads them: each is a run, or several if its windows are more rows than a run has.

    run: the outputs of rows, for a request. max_batch: rows of a run. at_once: texts of a request that run or wait.
    """

    def __init__(
        self,
        task_of: Callable[[TextOptions], Task],
        run: Callable[[Mapping[str, Array], Waiting], Awaitable[Outputs]],
        max_batch: int,
        at_once: int,
    ) -> None:
        self._task_of = task_of
        task = task_of(DEFAULT_OPTIONS)
        self._run = run
        self._max_batch = max_batch
        self._at_once = at_once
        self.name = task.name
        self.is_embedding = isinstance(task, Embedding)
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

    async def outputs_of(
        self, texts: Sequence[tuple[str, str | None]], wanted: Iterable[str], options: TextOptions, waiting: Waiting
    ) -> dict[str, Array]:
        """The wanted outputs for texts, or for pairs of texts: answers as JSON, and vectors in float32.

        Raises as `answers`.
        """
        found = await self.answers(texts, wanted, options, waiting)
        outputs: dict[str, Array] = {}
        if ANSWER in wanted:
            outputs[ANSWER] = objects([msgspec.json.encode(one[ANSWER]) for one in found])
        if EMBEDDING in found[0]:
            outputs[EMBEDDING] = np.stack([one[EMBEDDING] for one in found])
        return outputs

    async def answers(
        self, texts: Sequence[tuple[Any, str | None]], wanted: Iterable[str], options: TextOptions, waiting: Waiting
    ) -> list[dict[str, Any]]:
        """The wanted outputs for each text, or for tokens that the client has made.

        Raises UserError with the index of a text that cannot be answered.
        """
        task, places = self._task_of(options), asyncio.Semaphore(self._at_once)
        sizes = [len(text) + len(pair or "") for text, pair in texts]

        async def one(index: int) -> dict[str, Any]:
            with named_by(index, len(texts)):
                async with places, waiting.memory.holding(sizes[index], waiting.timeout_s):
                    prepared = await aside(sizes[index], partial(task.prepare, *texts[index]), THREAD_CHARACTERS)
                    return await self._answer(task, prepared, wanted, waiting)

        # texts of similar length follow each other, so that more of them share a run
        order = sorted(range(len(texts)), key=lambda index: sizes[index])
        running = {index: asyncio.create_task(one(index)) for index in order}
        try:
            await asyncio.gather(*running.values())
        finally:
            for text in running.values():
                text.cancel()
        return [running[index].result() for index in range(len(texts))]

    async def _answer(
        self, task: Task, prepared: PreparedText, wanted: Iterable[str], waiting: Waiting
    ) -> dict[str, Any]:
        windows = len(prepared.windows)
        if windows > MAX_TEXTS:
            raise UserError(f"the text is {windows} windows; expected at most {MAX_TEXTS}: send it in parts")
        parts = [await self._run(rows, waiting) for rows in prepared.rows(self._max_batch)]

        def read() -> dict[str, Any]:
            outputs, found = joined_outputs(parts), dict[str, Any]()
            if ANSWER in wanted:
                found[ANSWER] = task.answer(prepared, outputs)
            if EMBEDDING in wanted and isinstance(task, Embedding):
                found[EMBEDDING] = task.vector(prepared, outputs)
            return found

        return await aside(sum(array.nbytes for part in parts for array in part.values()), read)


class Stream:
    """The pieces of one text, for the event loop that asked for it. `close` ends the generation, in any state.

    counted: the tokens that are in the metrics. changed: set when `pieces` should look for what is new.
    """

    counted = 0

    def __init__(self, session: Session, timeout_s: float | None, on_close: Callable[[], None]) -> None:
        self.session = session
        self._timeout_s = timeout_s
        self._on_close = on_close
        self.changed = asyncio.Event()

    async def answers(
        self, *, in_pieces: bool, check_client: Callable[[], None] = lambda: None
    ) -> AsyncIterator[dict[str, Any]]:
        """The fields of answers: one with the whole text, or one for each new part. The last says how the text ended.

        check_client: called whenever there is more text; it may raise ClientGoneError. Raises as `pieces`.
        """
        pieces: list[Piece] = []
        reason = None
        while reason is None:
            pieces += await self.pieces()
            check_client()
            reason = pieces[-1].finish_reason
            # the text of a token that ends inside a character comes with a later token
            if reason is not None or (in_pieces and any(piece.text for piece in pieces)):
                answer: dict[str, Any] = {
                    TEXT_OUTPUT: "".join(piece.text for piece in pieces),
                    "tokens": [piece.token for piece in pieces if piece.finish_reason != "eos"],
                }
                if reason is not None:
                    prompt_tokens, seed = len(self.session.prompt), self.session.seed
                    answer |= {FINISH_REASON: reason, "prompt_tokens": prompt_tokens, "seed": seed}
                yield answer
                pieces = []

    async def pieces(self) -> list[Piece]:
        """The next pieces, at least one; not called after the last.

        Raises RequestError if there are none in time or the model failed.
        """
        session = self.session
        try:
            # a limit takes as long as the rest of this, for each token
            async with contextlib.nullcontext() if self._timeout_s is None else asyncio.timeout(self._timeout_s):
                while not session.pieces:
                    if session.error is not None:
                        logger.error("a text could not be continued: %s", session.error)
                        raise RequestError(str(session.error), FAILED)
                    await self.changed.wait()
                    self.changed.clear()
        except TimeoutError:
            message = f"no token came within {self._timeout_s:g} s; try again later"
            raise RequestError(message, WAITED_TOO_LONG) from None
        return [session.pieces.popleft() for _ in range(len(session.pieces))]

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
        generator.warm_up()
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
        self._loop = asyncio.get_running_loop()
        place = object()
        self._places.add(place)
        try:
            begin = partial(self._generator.session, prompt, sampling)
            session = await aside(len(prompt), begin, THREAD_CHARACTERS)
            stream = Stream(session, self._timeout_s, lambda: self._places.discard(place))
            self.add(stream)
        except BaseException:
            self._places.discard(place)
            raise
        return stream

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
            if stepped := stepper.step():
                streams = [running[session] for session in stepped if session in running]
                self._stepped(streams, time.perf_counter() - started)

    def _stepped(self, streams: Sequence[Stream], seconds: float) -> None:
        """Count a step, and wake those who wait for its texts, in one call."""
        if self._metrics is not None:
            self._metrics.step_s.observe(seconds)
            for stream in streams:
                self._metrics.tokens.inc(stream.session.count - stream.counted)
                stream.counted = stream.session.count

        def wake() -> None:
            for stream in streams:
                stream.changed.set()

        # if the loop has ended, nobody waits for its texts
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(wake)
