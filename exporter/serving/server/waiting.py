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
    """How the texts of one request wait. gone: see `watched`. memory: of the server."""

    timeout_s: float
    gone: Gone
    memory: TextMemory
