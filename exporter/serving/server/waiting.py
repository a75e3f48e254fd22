"""How the texts of a request wait: for memory, for runs, and no longer than their client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from effexport.serving.server.batcher import waited_too_long
from effexport.serving.server.queued import Gone


class TextMemory:
    """Characters that may be tokens at the same time, for all models of a server together: a token takes about 600
    bytes. Further texts wait. Only the event loop uses it."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._limit = limit
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def holding(self, characters: int, timeout_s: float) -> AsyncIterator[None]:
        """Raises RequestError if there is no room in time."""
        characters = min(characters, self._limit)
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._left >= characters), timeout_s)
            except TimeoutError:
                raise waited_too_long() from None
            self._left -= characters
        try:
            yield
        finally:
            self._left += characters
            async with self._changed:
                self._changed.notify_all()


@dataclass(frozen=True)
class Waiting:
    """How the texts of one request wait. gone: see `watched`. memory: of the server."""

    timeout_s: float
    gone: Gone
    memory: TextMemory
