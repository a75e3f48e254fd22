"""One run in the queue of a model, from a request's point of view: wait for it, unless the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from effexport.runners.joining import rows_of
from effexport.serving.protocol.body import Receive
from effexport.serving.protocol.errors import ClientGoneError
from effexport.serving.server.batcher import Batcher, Job, waited_too_long

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.serving.protocol.signature import Signature
    from effexport.serving.settings import ServingSettings

Gone = asyncio.Future[None]


class Queued(Protocol):
    """A model with a queue, as requests see it."""

    @property
    def batcher(self) -> Batcher: ...

    @property
    def signature(self) -> Signature: ...

    @property
    def settings(self) -> ServingSettings: ...


async def outputs_of(model: Queued, feeds: Mapping[str, Array], timeout_s: float, gone: Gone) -> Mapping[str, Array]:
    """Queue feeds and wait for their outputs. gone: see `watched`.

    Raises ClientGoneError, or RequestError if the queue is full or the run does not start in time.
    """
    job = model.batcher.submit(feeds, rows_of(feeds), timeout_s)
    try:
        return await first_of(job, gone, timeout_s)
    finally:
        if not job.answer.done():
            model.batcher.withdraw(job)


@contextmanager
def watched(receive: Receive) -> Iterator[Gone]:
    """Yield a future that is done when the client of a request has gone; its body has been read."""
    gone = asyncio.ensure_future(client_gone(receive))
    try:
        yield gone
    finally:
        gone.cancel()


async def first_of(job: Job, gone: Gone, timeout_s: float) -> Mapping[str, Array]:
    """The outputs of the job. Raises ClientGoneError, or RequestError if the job does not start in time."""
    timeout: float | None = timeout_s
    while True:
        either: tuple[asyncio.Future[Any], ...] = (job.answer, gone)
        done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if job.answer in done:
            return job.answer.result()
        if gone in done:
            raise ClientGoneError
        if not job.started:
            raise waited_too_long()
        timeout = None  # the run has started and cannot be stopped


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
