"""Continuous batching: threads run the model; whenever one is free, it takes waiting requests that fit together.

They are joined along the batch axis, padded if needed, and their outputs taken apart again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from effexport.base.dtypes import Array, joined_rows
from effexport.base.errors import EffexportError
from effexport.base.spec import BuildSpec
from effexport.runners.runner import Closeable
from effexport.serving.engine.errors import FAILED, QUEUE_FULL, WAITED_TOO_LONG, RequestError, stopping
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.settings import ServingSettings

Key = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Padding:
    """Padding of requests of different lengths to one length.

    inputs, outputs: the axis of tokens of each input and output that has one. values: what stands in the padded places
    of an input, if not 0.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    values: Mapping[str, int]

    @classmethod
    def from_spec(cls, spec: BuildSpec) -> Padding:
        inputs, outputs = (
            {tensor.name: tensor.dims.index("seq") for tensor in tensors if "seq" in tensor.dims}
            for tensors in (spec.inputs, spec.outputs)
        )
        return cls(inputs, outputs, {"input_ids": spec.model.pad_token_id})

    def length_of(self, feeds: Mapping[str, Array]) -> int:
        """Tokens of a request; 0 if no input has an axis of tokens. feeds: all inputs of the model."""
        return next((int(feeds[name].shape[axis]) for name, axis in self.inputs.items()), 0)

    def key_of(self, feeds: Mapping[str, Array]) -> Key:
        """Equal for requests that differ only in their number of rows and in what is padded.

        feeds: all inputs of the model.
        """
        return tuple(
            tuple(size for axis, size in enumerate(feeds[name].shape) if axis not in (0, self.inputs.get(name)))
            for name in sorted(feeds)
        )

    def joined(self, feeds: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        """The feeds of several requests as one batch, of the length of the longest. A padded attention mask is 0."""
        return {name: joined_rows([one[name] for one in feeds], self.values.get(name, 0)) for name in feeds[0]}

    def split(self, outputs: Mapping[str, Array], feeds: Sequence[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
        """The outputs of each request, as views. feeds: of the requests that were joined."""
        parts: list[Mapping[str, Array]] = []
        start = 0
        for one in feeds:
            rows, length = slice(start, start := start + rows_of(one)), slice(self.length_of(one))
            part = {}
            for name, array in outputs.items():
                axis = self.outputs.get(name)
                part[name] = array[rows] if axis is None else array[(rows, *[slice(None)] * (axis - 1), length)]
            parts.append(part)
        return parts


# For requests that only run together if they have the same length.
NO_PADDING = Padding({}, {}, {})


def rows_of(feeds: Mapping[str, Array]) -> int:
    """Rows of a request: those of its first input, which has a batch axis wherever requests are joined."""
    first = next(iter(feeds.values()))
    return len(first) if first.ndim else 1


def padding_share(rows: Sequence[int], lengths: Sequence[int]) -> float:
    """The share of a run's tokens that would be padding. rows, lengths: of each request."""
    own = sum(count * length for count, length in zip(rows, lengths, strict=True))
    whole = sum(rows) * max(lengths)
    return 1 - own / whole if whole else 0.0


logger = logging.getLogger("effexport.serving")
Result = TypeVar("Result")
Outputs = Mapping[str, "Array"]
# The outputs of a request, or its error.
Outcome = Outputs | EffexportError
Run = Callable[[Mapping[str, "Array"]], Outputs]
# What reads or writes more is done in another thread, because no other request is read in the meantime.
THREAD_BYTES = 64 << 10


class Job:
    """A waiting request. rows, length, key: whether it may share a run, as in `first_batch`. length: in tokens; 0 if no
    input has an axis of tokens. enqueued: from time.perf_counter."""

    started = False

    def __init__(self, feeds: Mapping[str, Array], padding: Padding = NO_PADDING) -> None:
        self.feeds = feeds
        self.rows = rows_of(feeds)
        self.length = padding.length_of(feeds)
        self.key = padding.key_of(feeds)
        self.enqueued = time.perf_counter()
        self.answer: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()


def first_batch(waiting: Sequence[Job], fits: Callable[[Sequence[Job]], bool]) -> list[Job]:
    """The oldest request, and those that may share its run: those closest to its length, the older ones first.

    fits: whether requests that differ only in what can be joined may share a run.
    """
    first = waiting[0]
    batch = [first]
    others = [one for one in waiting if one.key == first.key and one is not first]
    for one in sorted(others, key=lambda one: abs(one.length - first.length)):
        if fits([*batch, one]):
            batch.append(one)
    return batch


Item = TypeVar("Item")


class Queue(Closeable, Generic[Item]):
    """Items that wait, and the threads that take them. works: of each thread; it returns after `close`."""

    def __init__(self, name: str, *works: Callable[[], None]) -> None:
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def add(self, item: Item) -> None:
        """Let an item wait. Raises RequestError if the server is stopping."""
        with self._changed:
            if self._closing:
                raise stopping()
            self._waiting.append(item)
            # all, because the one that wakes up may only wait for others to join the oldest item
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end their work, which includes what was accepted, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


class Batcher(Queue[Job]):
    """The bounded queue of a model, and the threads that run it. It runs what was accepted before it stops.

    joins: whether requests may share a run. padding: how those of different lengths do, if the settings allow padding.
    """

    def __init__(
        self, run: Run, settings: ServingSettings, metrics: Metrics, *, joins: bool, padding: Padding = NO_PADDING
    ) -> None:
        self._run = run
        self.settings = settings
        self._metrics = metrics
        self._joins = joins
        self._padding = padding
        metrics.add_queue()
        self._busy_s = 0.01  # duration of recent runs, for Retry-After
        metrics.queue_depth.set_function(lambda: len(self._waiting))
        super().__init__("effexport-runner", *[self._work] * (settings.concurrent_runs or 1))

    @property
    def retry_after_s(self) -> int:
        """Estimated whole seconds until the present queue is empty, for the Retry-After header."""
        return max(1, round(len(self._waiting) * self._busy_s / len(self._threads)))

    def refuse_if_full(self) -> None:
        """Raises RequestError if no more requests may wait."""
        if len(self._waiting) >= self.settings.queue_size:
            raise RequestError(f"{self.settings.queue_size} requests are waiting; try again later", QUEUE_FULL)

    def submit(self, feeds: Mapping[str, Array]) -> Job:
        """Queue a request; called by one event loop, so that no other one takes its place. Raises RequestError."""
        self.refuse_if_full()
        job = Job(feeds, self._padding)
        self.add(job)
        return job

    async def outputs(self, feeds: Mapping[str, Array], timeout_s: float) -> Outputs:
        """Queue a request and wait for its outputs.

        Raises RequestError if the queue is full or the run does not start in time.
        """
        job = self.submit(feeds)
        try:
            await asyncio.wait([job.answer], timeout=timeout_s)
            if not (job.answer.done() or job.started):
                raise waited_too_long()
            return await job.answer  # a run that has started cannot be stopped
        finally:
            if not job.answer.done():
                self.withdraw(job)

    def withdraw(self, job: Job) -> None:
        """Forget a request that nobody waits for any more; called by the event loop. A run that has begun goes on.

        It leaves the queue at once, not when a run ends: until then it would take the place and the memory of others.
        """
        job.answer.cancel()
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(job)

    def _work(self) -> None:
        while batch := self._take():
            started = time.perf_counter()
            for job in batch:
                job.started = True
                self._metrics.queue_s.observe(started - job.enqueued)
            outcomes = run_together(self._timed, batch, self._padding)
            # In one call: for each, the threads would take turns, which costs as much again as all the rest of a small
            # request. If the loop has ended, nobody waits for them.
            with contextlib.suppress(RuntimeError):
                batch[0].answer.get_loop().call_soon_threadsafe(settle, batch, outcomes)
            seconds = (time.perf_counter() - started) / len(batch)
            with self._changed:
                self._busy_s += 0.2 * (seconds - self._busy_s)

    def _take(self) -> list[Job]:
        """The oldest job and the jobs that may join it; empty when the server stops."""
        with self._changed:
            while self._waiting or not self._closing:
                delay_s = None
                if self._waiting:
                    batch = first_batch(self._waiting, self._fits)
                    delay_s = self._delay_s(batch)
                    if delay_s <= 0:
                        for job in batch:
                            self._waiting.remove(job)
                        return batch
                self._changed.wait(delay_s)
        return []

    def _delay_s(self, batch: Sequence[Job]) -> float:
        """Seconds that a batch should wait for more jobs; 0 if none may join it."""
        has_room = self._has_room(sum(job.rows for job in batch) + 1, max(job.length for job in batch))
        if not (self._joins and has_room) or self._closing:
            return 0.0
        return batch[0].enqueued + self.settings.batch_delay_ms / 1e3 - time.perf_counter()

    def _fits(self, batch: Sequence[Job]) -> bool:
        rows, lengths = zip(*((one.rows, one.length) for one in batch), strict=True)
        has_room = self._joins and self._has_room(sum(rows), max(lengths))
        return has_room and padding_share(rows, lengths) <= self.settings.max_padding

    def _has_room(self, rows: int, length: int) -> bool:
        """True if requests may share a run of this size."""
        tokens = self.settings.max_run_tokens
        return rows <= self.settings.max_batch and (tokens is None or rows * length <= tokens)

    def _timed(self, feeds: Mapping[str, Array]) -> Outputs:
        started = time.perf_counter()
        outputs = self._run(feeds)
        self._metrics.compute_s.observe(time.perf_counter() - started)
        self._metrics.batch_size.observe(rows_of(feeds))
        return outputs


def why_not_joined(spec: BuildSpec) -> str:
    """The reason requests must not share a run; "" if the parity check has shown that samples are independent."""
    has_batch_axes = all(tensor.dims[:1] == ("batch",) for tensor in (*spec.inputs, *spec.outputs))
    alone = "" if has_batch_axes else "an input or output does not begin with a batch axis"
    return spec.model.why_samples_mix or alone


def run_together(run: Run, batch: Sequence[Job], padding: Padding = NO_PADDING) -> list[Outcome]:
    """The outputs of requests that run as one batch. If it fails, they run one by one, and some get their error."""
    feeds = [one.feeds for one in batch]
    try:
        return [run(feeds[0])] if len(batch) == 1 else [*padding.split(run(padding.joined(feeds)), feeds)]
    except Exception as error:  # the thread must survive anything that a runtime raises
        if len(batch) > 1:
            return [outcome for one in batch for outcome in run_together(run, [one], padding)]
        if isinstance(error, EffexportError):
            return [error]
        logger.error("a run failed unexpectedly", exc_info=error)
        return [RequestError("the run failed unexpectedly; the log of the server says why", FAILED)]


def waited_too_long() -> RequestError:
    return RequestError("the request waited too long for the runner; try again later", WAITED_TOO_LONG)


def settle(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
    """Answer those that somebody still waits for; called by the event loop."""
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.answer.done():
            continue
        if isinstance(outcome, Exception):
            job.answer.set_exception(outcome)
        else:
            job.answer.set_result(outcome)


async def aside(size: int, call: Callable[[], Result], most: int = THREAD_BYTES) -> Result:
    """The result of a call that reads or writes so many bytes, in another thread if they are more than `most`."""
    return await asyncio.to_thread(call) if size > most else call()


class TextMemory:
    """Characters that may be tokens at the same time, for all models of a server together: a token takes about 600
    bytes. Further texts wait. Only the event loop uses it."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._limit = limit
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def holding(self, characters: int, timeout_s: float) -> AsyncIterator[None]:
        """Raises RequestError if there is no room in time."""
        characters = min(characters, self._limit)
        try:
            async with asyncio.timeout(timeout_s):
                while self._left < characters:
                    await self._freed.wait()
        except TimeoutError:
            raise waited_too_long() from None
        self._left -= characters
        try:
            yield
        finally:
            # without an await, which could be cancelled, so that those who wait always hear of it
            self._left += characters
            self._freed.set()
            self._freed = asyncio.Event()


@dataclass(frozen=True)
class Waiting:
    """Limits for the texts of one request, which wait for memory and runs."""

    timeout_s: float
    memory: TextMemory
